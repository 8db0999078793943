package midstream.peers;

import java.time.Duration;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.RichFilterFunction;
import org.apache.flink.api.common.typeinfo.PrimitiveArrayTypeInfo;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.KeyedStream;
import org.apache.flink.streaming.api.datastream.SingleOutputStreamOperator;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.windowing.WindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.EventTimeSessionWindows;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingProcessingTimeWindows;
import org.apache.flink.streaming.api.windowing.triggers.Trigger;
import org.apache.flink.streaming.api.windowing.triggers.TriggerResult;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/**
 * NEXMark: how a query is run, and q0 to q5, q7, q8, q11, q12. Every query takes its columns out of the events in the
 * source's chain. Those of single rows are in NexmarkRows, those that report a day in NexmarkReports.
 */
final class NexmarkJobs {
    private static final Duration WINDOW = Duration.ofSeconds(10);
    private static final Duration SLIDE = Duration.ofSeconds(2);
    private static final long CHECKPOINT_MS = 1_000;
    private static final long WARM_UP = 1_000_000;
    private static final String SINK = "results";

    /** How many numbers each query's sink adds up: rows, then what midstream_lab.bench.nexmark says is checked. */
    private static final Map<String, Integer> SUMS =
            Map.ofEntries(
                    Map.entry("q0", 4), Map.entry("q1", 4), Map.entry("q2", 3), Map.entry("q3", 2),
                    Map.entry("q4", 11), Map.entry("q5", 3), Map.entry("q7", 4), Map.entry("q8", 2),
                    Map.entry("q9", 10), Map.entry("q11", 5), Map.entry("q12", 3), Map.entry("q14", 7),
                    Map.entry("q15", 13), Map.entry("q16", 15), Map.entry("q17", 10), Map.entry("q18", 8),
                    Map.entry("q20", 11), Map.entry("q21", 5), Map.entry("q22", 8));

    private NexmarkJobs() {}

    /** The workload is the query. */
    static Report run(Options options) throws Exception {
        String query = options.workload();
        if (!SUMS.containsKey(query)) {
            throw new IllegalArgumentException("there is no workload " + query);
        }
        int parallelism = options.parallelismOr(2);
        long events = options.eventsOr(10_000_000);
        long unit = (long) NexmarkEvents.EPOCH * parallelism;
        if (events % unit != 0) {
            throw new IllegalArgumentException("--events must be a multiple of " + unit);
        }
        try (Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(Map.of()))) {
            Configuration settings = Settings.ofJob(options.directory(), CHECKPOINT_MS, Map.of());
            long warmUp = Math.min(WARM_UP, events) / unit * unit;
            cluster.run(settings, parallelism, env -> build(query, read(options, env, warmUp)));
            Cluster.Outcome outcome =
                    cluster.run(settings, parallelism, env -> build(query, read(options, env, events)));
            return new Report(options, options.variant(), parallelism)
                    .rate(events, outcome.seconds())
                    .put("result", outcome.sums(SINK))
                    .checkpoints(outcome);
        }
    }

    /** The variant `parquet` reads files that run.py names in the environment, and their columns that the query needs. */
    private static DataStream<NexmarkEvents.Event> read(Options options, StreamExecutionEnvironment env, long events) {
        if (options.variant().equals("parquet")) {
            String directory = System.getenv("NEXMARK_FILES_" + events);
            return NexmarkFiles.read(env, directory, System.getenv("NEXMARK_COLUMNS").split(","));
        }
        int splits = env.getParallelism();
        IndexSource<NexmarkEvents.Event> source = new IndexSource<>(
                new NexmarkEvents(splits), Types.POJO(NexmarkEvents.Event.class), splits, events / splits, 0, 0);
        return env.fromSource(source, WatermarkStrategy.forMonotonousTimestamps(), "events");
    }

    static DataStream<NexmarkEvents.Event> only(DataStream<NexmarkEvents.Event> events, int kind) {
        return events.filter(event -> event.kind == kind);
    }

    private static void build(String query, DataStream<NexmarkEvents.Event> events) {
        switch (query) {
            case "q0", "q1" -> bids(query, events);
            case "q2" -> q2(events);
            case "q3" -> q3(events);
            case "q4" -> q4(events);
            case "q5" -> q5(events);
            case "q7" -> q7(events);
            case "q8" -> q8(events);
            case "q9" -> q9(events);
            case "q11" -> q11(events);
            case "q12" -> q12(events);
            case "q14" -> NexmarkRows.q14(events);
            case "q15" -> NexmarkReports.q15(events);
            case "q16" -> NexmarkReports.q16(events);
            case "q17" -> NexmarkReports.q17(events);
            case "q18" -> NexmarkReports.q18(events);
            case "q20" -> q20(events);
            case "q21" -> NexmarkRows.q21(events);
            default -> NexmarkRows.q22(events);
        }
    }

    static <T> Totals<T> sink(String query, Totals.Measure<T> measure) {
        return new Totals<>(SINK, SUMS.get(query), measure);
    }

    private static void bids(String query, DataStream<NexmarkEvents.Event> events) {
        double share = query.equals("q1") ? 0.908 : 1;
        only(events, NexmarkEvents.BID)
                .map(bid -> Tuple4.of(bid.bidAuction(), bid.bidder(), bid.price() * share, bid.timeMs))
                .returns(Types.TUPLE(Types.LONG, Types.LONG, Types.DOUBLE, Types.LONG))
                .flatMap(sink(query, (Tuple4<Long, Long, Double, Long> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.f0;
                    sums[2] += row.f1;
                    sums[3] += row.f2;
                }));
    }

    private static void q2(DataStream<NexmarkEvents.Event> events) {
        only(events, NexmarkEvents.BID)
                .map(bid -> Tuple2.of(bid.bidAuction(), bid.price()))
                .returns(Types.TUPLE(Types.LONG, Types.LONG))
                .filter(bid -> bid.f0 % 123 == 0)
                .flatMap(sink("q2", (Tuple2<Long, Long> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.f0;
                    sums[2] += row.f1;
                }));
    }

    private static void q3(DataStream<NexmarkEvents.Event> events) {
        DataStream<NexmarkJoins.Seller> persons = only(events, NexmarkEvents.PERSON)
                .map(one -> new NexmarkJoins.Seller(one.person(), one.name(), one.city(), one.state()))
                .returns(Types.POJO(NexmarkJoins.Seller.class))
                .filter(one -> one.state.equals("OR") || one.state.equals("ID") || one.state.equals("CA"));
        DataStream<Tuple2<Long, Long>> auctions = only(events, NexmarkEvents.AUCTION)
                .filter(one -> one.category() == 10)
                .map(one -> Tuple2.of(one.seller(), one.auction()))
                .returns(Types.TUPLE(Types.LONG, Types.LONG));
        persons.keyBy(one -> one.id, Types.LONG)
                .connect(auctions.keyBy(one -> one.f0, Types.LONG))
                .process(new NexmarkJoins.Incremental())
                .returns(NexmarkJoins.Incremental.TYPE)
                .flatMap(sink("q3", (Tuple4<String, String, String, Long> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.f3;
                }));
    }

    private static void q4(DataStream<NexmarkEvents.Event> events) {
        DataStream<Tuple3<Long, Long, Integer>> auctions = only(events, NexmarkEvents.AUCTION)
                .map(one -> Tuple3.of(one.auction(), one.expiresMs(), one.category()))
                .returns(Types.TUPLE(Types.LONG, Types.LONG, Types.INT));
        DataStream<Tuple2<Long, Long>> bids = only(events, NexmarkEvents.BID)
                .map(one -> Tuple2.of(one.bidAuction(), one.price()))
                .returns(Types.TUPLE(Types.LONG, Types.LONG));
        auctions.keyBy(one -> one.f0, Types.LONG)
                .connect(bids.keyBy(one -> one.f0, Types.LONG))
                .process(new NexmarkJoins.FinalPrice())
                .returns(NexmarkJoins.FinalPrice.TYPE)
                .keyBy(one -> one.f0, Types.INT)
                .map(new NexmarkJoins.RunningAverage())
                .returns(NexmarkJoins.RunningAverage.TYPE)
                .flatMap(sink("q4", (Tuple3<Integer, Double, Long> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1 + row.f0 - 10] += 1;
                    sums[6 + row.f0 - 10] += row.f2;
                }));
    }

    private static final class Counting implements AggregateFunction<Long, Long, Long> {
        @Override
        public Long createAccumulator() {
            return 0L;
        }

        @Override
        public Long add(Long row, Long found) {
            return found + 1;
        }

        @Override
        public Long getResult(Long found) {
            return found;
        }

        @Override
        public Long merge(Long one, Long other) {
            return one + other;
        }
    }

    /** Window's end, number that is compared, and of those that have it what identifies them. */
    private static final TypeInformation<Tuple3<Long, Long, long[]>> BEST =
            Types.TUPLE(Types.LONG, Types.LONG, PrimitiveArrayTypeInfo.LONG_PRIMITIVE_ARRAY_TYPE_INFO);

    private static final class WithWindow implements WindowFunction<Long, Tuple3<Long, Long, long[]>, Long, TimeWindow> {
        @Override
        public void apply(Long auction, TimeWindow window, Iterable<Long> counts, Collector<Tuple3<Long, Long, long[]>> out) {
            out.collect(Tuple3.of(window.getEnd(), counts.iterator().next(), new long[] {auction}));
        }
    }

    private static void q5(DataStream<NexmarkEvents.Event> events) {
        SingleOutputStreamOperator<Tuple3<Long, Long, long[]>> counts = only(events, NexmarkEvents.BID)
                .map(bid -> bid.bidAuction())
                .returns(Types.LONG)
                .keyBy(auction -> auction, Types.LONG)
                .window(SlidingEventTimeWindows.of(WINDOW, SLIDE))
                .aggregate(new Counting(), new WithWindow(), Types.LONG, BEST);
        counts.keyBy(one -> one.f0, Types.LONG)
                .process(new NexmarkJoins.BestOfWindow())
                .returns(BEST)
                .flatMap(sink("q5", (Tuple3<Long, Long, long[]> row, double[] sums) -> {
                    for (long auction : row.f2) {
                        sums[0] += 1;
                        sums[1] += row.f1;
                        sums[2] += auction;
                    }
                }));
    }

    /** Of a subtask's bids those that are no lower than the highest of their window so far. */
    private static final class Highest extends RichFilterFunction<Tuple3<Long, Long, long[]>> {
        private transient long windowEndMs;
        private transient long price;

        @Override
        public boolean filter(Tuple3<Long, Long, long[]> bid) {
            if (bid.f0 != windowEndMs) {
                windowEndMs = bid.f0;
                price = 0;
            }
            price = Math.max(price, bid.f1);
            return bid.f1 == price;
        }
    }

    /** What cannot be among the highest does not go to the one task that a window has. */
    private static void q7(DataStream<NexmarkEvents.Event> events) {
        long sizeMs = WINDOW.toMillis();
        only(events, NexmarkEvents.BID)
                .map(bid -> Tuple3.of((bid.timeMs / sizeMs + 1) * sizeMs, bid.price(),
                        new long[] {bid.bidAuction(), bid.bidder()}))
                .returns(BEST)
                .filter(new Highest())
                .keyBy(one -> one.f0, Types.LONG)
                .process(new NexmarkJoins.BestOfWindow())
                .returns(BEST)
                .flatMap(sink("q7", (Tuple3<Long, Long, long[]> row, double[] sums) -> {
                    for (int i = 0; i < row.f2.length; i += 2) {
                        sums[0] += 1;
                        sums[1] += row.f1;
                        sums[2] += row.f2[i];
                        sums[3] += row.f2[i + 1];
                    }
                }));
    }

    private static final int CREATED = 1;
    private static final int SOLD = 2;

    private static final class Merged implements
            AggregateFunction<Tuple3<Long, Integer, String>, Tuple3<Long, Integer, String>, Tuple3<Long, Integer, String>> {
        @Override
        public Tuple3<Long, Integer, String> createAccumulator() {
            return Tuple3.of(0L, 0, "");
        }

        @Override
        public Tuple3<Long, Integer, String> add(Tuple3<Long, Integer, String> row, Tuple3<Long, Integer, String> found) {
            found.f0 = row.f0;
            found.f1 |= row.f1;
            if (row.f1 == CREATED) {
                found.f2 = row.f2;
            }
            return found;
        }

        @Override
        public Tuple3<Long, Integer, String> getResult(Tuple3<Long, Integer, String> found) {
            return found;
        }

        @Override
        public Tuple3<Long, Integer, String> merge(
                Tuple3<Long, Integer, String> one, Tuple3<Long, Integer, String> other) {
            throw new UnsupportedOperationException("these windows do not merge");
        }
    }

    /** Persons and sellers in one stream, and windows that saw both of somebody: cheaper than Flink's window join. */
    private static void q8(DataStream<NexmarkEvents.Event> events) {
        TypeInformation<Tuple3<Long, Integer, String>> type = Types.TUPLE(Types.LONG, Types.INT, Types.STRING);
        events.filter(one -> one.kind != NexmarkEvents.BID)
                .map(one -> one.kind == NexmarkEvents.PERSON
                        ? Tuple3.of(one.person(), CREATED, one.name())
                        : Tuple3.of(one.seller(), SOLD, ""))
                .returns(type)
                .keyBy(one -> one.f0, Types.LONG)
                .window(TumblingEventTimeWindows.of(WINDOW))
                .aggregate(new Merged(), type, type)
                .filter(one -> one.f1 == (CREATED | SOLD))
                .flatMap(sink("q8", (Tuple3<Long, Integer, String> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.f0;
                }));
    }

    private static void q9(DataStream<NexmarkEvents.Event> events) {
        DataStream<NexmarkWinners.Auction> auctions = only(events, NexmarkEvents.AUCTION)
                .map(one -> NexmarkWinners.Auction.of(one))
                .returns(Types.POJO(NexmarkWinners.Auction.class));
        DataStream<NexmarkWinners.Bid> bids = only(events, NexmarkEvents.BID)
                .map(one -> NexmarkWinners.Bid.of(one))
                .returns(Types.POJO(NexmarkWinners.Bid.class));
        auctions.keyBy(one -> one.id, Types.LONG)
                .connect(bids.keyBy(one -> one.auction, Types.LONG))
                .process(new NexmarkWinners.WinningBid())
                .returns(NexmarkWinners.WinningBid.TYPE)
                .flatMap(sink("q9", (Tuple2<NexmarkWinners.Auction, NexmarkWinners.Bid> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.f0.id;
                    sums[2] += row.f0.item.length();
                    sums[3] += row.f0.reserve;
                    sums[4] += row.f0.expiresMs;
                    sums[5] += row.f0.seller;
                    sums[6] += row.f1.bidder;
                    sums[7] += row.f1.price;
                    sums[8] += row.f1.timeMs;
                    sums[9] += row.f1.extra.length();
                }));
    }

    private static void q20(DataStream<NexmarkEvents.Event> events) {
        DataStream<NexmarkWinners.Auction> auctions = only(events, NexmarkEvents.AUCTION)
                .filter(one -> one.category() == 10)
                .map(one -> NexmarkWinners.Auction.of(one))
                .returns(Types.POJO(NexmarkWinners.Auction.class));
        DataStream<NexmarkWinners.WholeBid> bids = only(events, NexmarkEvents.BID)
                .map(one -> NexmarkWinners.WholeBid.of(one))
                .returns(Types.POJO(NexmarkWinners.WholeBid.class));
        auctions.keyBy(one -> one.id, Types.LONG)
                .connect(bids.keyBy(one -> one.auction, Types.LONG))
                .process(new NexmarkWinners.WithAuction())
                .returns(NexmarkWinners.WithAuction.TYPE)
                .flatMap(sink("q20", (Tuple2<NexmarkWinners.WholeBid, NexmarkWinners.Auction> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.f0.auction;
                    sums[2] += row.f0.bidder;
                    sums[3] += row.f0.price;
                    sums[4] += row.f0.channel.length();
                    sums[5] += row.f0.url.length();
                    sums[6] += row.f0.extra.length();
                    sums[7] += row.f1.item.length();
                    sums[8] += row.f1.reserve;
                    sums[9] += row.f1.expiresMs;
                    sums[10] += row.f1.seller;
                }));
    }

    /** Bidder, bids, begin and end of the window. */
    private static final TypeInformation<Tuple4<Long, Long, Long, Long>> BIDDER_COUNT =
            Types.TUPLE(Types.LONG, Types.LONG, Types.LONG, Types.LONG);

    private static final class OfBidder
            implements WindowFunction<Long, Tuple4<Long, Long, Long, Long>, Long, TimeWindow> {
        @Override
        public void apply(
                Long bidder, TimeWindow window, Iterable<Long> counts, Collector<Tuple4<Long, Long, Long, Long>> out) {
            out.collect(Tuple4.of(bidder, counts.iterator().next(), window.getStart(), window.getEnd()));
        }
    }

    private static KeyedStream<Long, Long> bidders(DataStream<NexmarkEvents.Event> events) {
        return only(events, NexmarkEvents.BID)
                .map(bid -> bid.bidder())
                .returns(Types.LONG)
                .keyBy(bidder -> bidder, Types.LONG);
    }

    private static void q11(DataStream<NexmarkEvents.Event> events) {
        bidders(events)
                .window(EventTimeSessionWindows.withGap(WINDOW))
                .aggregate(new Counting(), new OfBidder(), Types.LONG, BIDDER_COUNT)
                .flatMap(sink("q11", (Tuple4<Long, Long, Long, Long> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.f0;
                    sums[2] += row.f1;
                    sums[3] += row.f2;
                    sums[4] += row.f3;
                }));
    }

    /** By the clock, and when the input ends: Flink drops timers of the clock that are pending then. */
    private static final class ByClock extends Trigger<Object, TimeWindow> {
        @Override
        public TriggerResult onElement(Object row, long timestamp, TimeWindow window, TriggerContext context) {
            context.registerProcessingTimeTimer(window.maxTimestamp());
            context.registerEventTimeTimer(Long.MAX_VALUE);
            return TriggerResult.CONTINUE;
        }

        @Override
        public TriggerResult onProcessingTime(long timeMs, TimeWindow window, TriggerContext context) {
            return TriggerResult.FIRE_AND_PURGE;
        }

        @Override
        public TriggerResult onEventTime(long timeMs, TimeWindow window, TriggerContext context) {
            return TriggerResult.FIRE_AND_PURGE;
        }

        @Override
        public void clear(TimeWindow window, TriggerContext context) {
            context.deleteProcessingTimeTimer(window.maxTimestamp());
            context.deleteEventTimeTimer(Long.MAX_VALUE);
        }
    }

    private static void q12(DataStream<NexmarkEvents.Event> events) {
        bidders(events)
                .window(TumblingProcessingTimeWindows.of(WINDOW))
                .trigger(new ByClock())
                .aggregate(new Counting(), new OfBidder(), Types.LONG, BIDDER_COUNT)
                .flatMap(sink("q12", (Tuple4<Long, Long, Long, Long> row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.f1;
                    sums[2] += (double) row.f0 * row.f1;
                }));
    }
}
