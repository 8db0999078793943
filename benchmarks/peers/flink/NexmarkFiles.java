package midstream.peers;

import java.util.ArrayDeque;
import java.util.Collection;
import java.util.Comparator;
import java.util.List;
import java.util.Optional;
import java.util.Queue;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.connector.file.src.FileSource;
import org.apache.flink.connector.file.src.FileSourceSplit;
import org.apache.flink.connector.file.src.assigners.FileSplitAssigner;
import org.apache.flink.core.fs.Path;
import org.apache.flink.formats.parquet.ParquetColumnarRowInputFormat;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.logical.BigIntType;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.RowType;
import org.apache.flink.table.types.logical.TinyIntType;
import org.apache.flink.table.types.logical.VarCharType;

/** NEXMark events from Parquet files, read by columns; files are read in the order of their names, which is that of time. */
final class NexmarkFiles {
    private static final int BATCH_ROWS = 2048;
    private static final List<String> TEXTS =
            List.of("name", "city", "state", "email", "credit_card", "item", "channel", "url", "extra");

    private NexmarkFiles() {}

    /** `columns`: those that are read, in the order of the files; "kind" and "time" are the first. Times are numbers. */
    static DataStream<NexmarkEvents.Event> read(StreamExecutionEnvironment env, String directory, String[] columns) {
        LogicalType[] types = new LogicalType[columns.length];
        for (int i = 0; i < columns.length; i++) {
            types[i] = i == 0 ? new TinyIntType()
                    : TEXTS.contains(columns[i]) ? new VarCharType(VarCharType.MAX_LENGTH) : new BigIntType();
        }
        RowType row = RowType.of(types, columns);
        FileSource<RowData> source = FileSource.forBulkFileFormat(
                        new ParquetColumnarRowInputFormat<FileSourceSplit>(
                                new org.apache.hadoop.conf.Configuration(), row, InternalTypeInfo.of(row), BATCH_ROWS,
                                true, true),
                        new Path(directory))
                .setSplitAssigner(InOrder::new)
                .build();
        WatermarkStrategy<RowData> times =
                WatermarkStrategy.<RowData>forMonotonousTimestamps().withTimestampAssigner((one, before) -> one.getLong(1));
        return env.fromSource(source, times, "events")
                .map(new ToEvent(columns))
                .returns(Types.POJO(NexmarkEvents.Event.class));
    }

    private static final class InOrder implements FileSplitAssigner {
        private final Queue<FileSourceSplit> waiting;

        InOrder(Collection<FileSourceSplit> splits) {
            waiting = new ArrayDeque<>(
                    splits.stream().sorted(Comparator.comparing(split -> split.path().getName())).toList());
        }

        @Override
        public Optional<FileSourceSplit> getNext(String host) {
            return Optional.ofNullable(waiting.poll());
        }

        @Override
        public void addSplits(Collection<FileSourceSplit> splits) {
            waiting.addAll(splits);
        }

        @Override
        public Collection<FileSourceSplit> remainingSplits() {
            return waiting;
        }
    }

    /** The same event each time: the queries in the source's chain take what they need of it before the next one. */
    private static final class ToEvent extends RichMapFunction<RowData, NexmarkEvents.Event> {
        private final String[] columns;
        private transient InFile event;

        ToEvent(String[] columns) {
            this.columns = columns;
        }

        @Override
        public NexmarkEvents.Event map(RowData row) {
            if (event == null) {
                event = new InFile(List.of(columns));
            }
            event.row = row;
            event.kind = row.getByte(0);
            event.timeMs = row.getLong(1);
            return event;
        }
    }

    /** An event whose values are those of the row that is being read. */
    private static final class InFile extends NexmarkEvents.Event {
        private final int name;
        private final int city;
        private final int state;
        private final int person;
        private final int auction;
        private final int item;
        private final int seller;
        private final int category;
        private final int initialBid;
        private final int reserve;
        private final int expires;
        private final int bidAuction;
        private final int bidder;
        private final int price;
        private final int channel;
        private final int url;
        private final int extra;
        private RowData row;

        InFile(List<String> columns) {
            name = columns.indexOf("name");
            city = columns.indexOf("city");
            state = columns.indexOf("state");
            person = columns.indexOf("person");
            auction = columns.indexOf("auction");
            item = columns.indexOf("item");
            seller = columns.indexOf("seller");
            category = columns.indexOf("category");
            initialBid = columns.indexOf("initial_bid");
            reserve = columns.indexOf("reserve");
            expires = columns.indexOf("expires");
            bidAuction = columns.indexOf("bid_auction");
            bidder = columns.indexOf("bidder");
            price = columns.indexOf("price");
            channel = columns.indexOf("channel");
            url = columns.indexOf("url");
            extra = columns.indexOf("extra");
        }

        @Override
        String name() {
            return row.getString(name).toString();
        }

        @Override
        String city() {
            return row.getString(city).toString();
        }

        @Override
        String state() {
            return row.getString(state).toString();
        }

        @Override
        long person() {
            return row.getLong(person);
        }

        @Override
        long auction() {
            return row.getLong(auction);
        }

        @Override
        String item() {
            return row.getString(item).toString();
        }

        @Override
        long seller() {
            return row.getLong(seller);
        }

        @Override
        int category() {
            return (int) row.getLong(category);
        }

        @Override
        long initialBid() {
            return row.getLong(initialBid);
        }

        @Override
        long reserve() {
            return row.getLong(reserve);
        }

        @Override
        long expiresMs() {
            return row.getLong(expires);
        }

        @Override
        long bidAuction() {
            return row.getLong(bidAuction);
        }

        @Override
        long bidder() {
            return row.getLong(bidder);
        }

        @Override
        long price() {
            return row.getLong(price);
        }

        @Override
        String channel() {
            return row.getString(channel).toString();
        }

        @Override
        String url() {
            return row.getString(url).toString();
        }

        @Override
        String extra() {
            return row.getString(extra).toString();
        }
    }
}
