package midstream.peers;

import java.time.LocalDateTime;
import java.time.ZoneOffset;
import java.util.Locale;
import java.util.regex.Matcher;
import java.util.regex.Pattern;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.streaming.api.datastream.DataStream;

/** q14, q21, q22: one row to one row, or none, in the source's chain. */
final class NexmarkRows {
    private static final double EURO = 0.908;
    private static final Pattern CHANNEL_ID = Pattern.compile("(&|^)channel_id=([^&]*)");

    private NexmarkRows() {}

    /** A POJO: a row of q14. */
    public static final class Calculated {
        public long auction;
        public long bidder;
        public double price;
        public String bidTimeType;
        public long timeMs;
        public String extra;
        public long cCounts;
    }

    static void q14(DataStream<NexmarkEvents.Event> events) {
        NexmarkJobs.only(events, NexmarkEvents.BID)
                .map(NexmarkRows::inEuros)
                .returns(Types.POJO(Calculated.class))
                .filter(row -> row.price > 1_000_000 && row.price < 50_000_000)
                .map(NexmarkRows::calculated)
                .returns(Types.POJO(Calculated.class))
                .flatMap(NexmarkJobs.sink("q14", (Calculated row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.auction;
                    sums[2] += row.bidder;
                    sums[3] += row.price;
                    sums[4] += row.bidTimeType.length();
                    sums[5] += row.cCounts;
                    sums[6] += row.extra.length();
                }));
    }

    private static Calculated inEuros(NexmarkEvents.Event bid) {
        Calculated row = new Calculated();
        row.auction = bid.bidAuction();
        row.bidder = bid.bidder();
        row.price = bid.price() * EURO;
        row.timeMs = bid.timeMs;
        row.extra = bid.extra();
        return row;
    }

    private static Calculated calculated(Calculated row) {
        int hour = LocalDateTime.ofEpochSecond(row.timeMs / 1000, 0, ZoneOffset.UTC).getHour();
        row.bidTimeType = hour >= 8 && hour <= 18 ? "dayTime" : hour <= 6 || hour >= 20 ? "nightTime" : "otherTime";
        row.cCounts = countChar(row.extra, 'c');
        return row;
    }

    private static long countChar(String text, char wanted) {
        long count = 0;
        for (int i = 0; i < text.length(); i++) {
            if (text.charAt(i) == wanted) {
                count++;
            }
        }
        return count;
    }

    /** A POJO: a row of q21. */
    public static final class WithChannelId {
        public long auction;
        public long bidder;
        public long price;
        public String channel;
        public String channelId;
    }

    static void q21(DataStream<NexmarkEvents.Event> events) {
        NexmarkJobs.only(events, NexmarkEvents.BID)
                .map(NexmarkRows::withChannelId)
                .returns(Types.POJO(WithChannelId.class))
                .filter(row -> row.channelId != null)
                .flatMap(NexmarkJobs.sink("q21", (WithChannelId row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.auction;
                    sums[2] += row.bidder;
                    sums[3] += row.price;
                    sums[4] += Long.parseLong(row.channelId);
                }));
    }

    private static WithChannelId withChannelId(NexmarkEvents.Event bid) {
        WithChannelId row = new WithChannelId();
        row.auction = bid.bidAuction();
        row.bidder = bid.bidder();
        row.price = bid.price();
        row.channel = bid.channel();
        row.channelId = channelId(row.channel, bid.url());
        return row;
    }

    private static String channelId(String channel, String url) {
        switch (channel.toLowerCase(Locale.ROOT)) {
            case "apple":
                return "0";
            case "google":
                return "1";
            case "facebook":
                return "2";
            case "baidu":
                return "3";
            default:
                Matcher found = CHANNEL_ID.matcher(url);
                return found.find() ? found.group(2) : null;
        }
    }

    /** A POJO: a row of q22. */
    public static final class WithDirectories {
        public long auction;
        public long bidder;
        public long price;
        public String channel;
        public String dir1;
        public String dir2;
        public String dir3;
    }

    static void q22(DataStream<NexmarkEvents.Event> events) {
        NexmarkJobs.only(events, NexmarkEvents.BID)
                .map(NexmarkRows::withDirectories)
                .returns(Types.POJO(WithDirectories.class))
                .flatMap(NexmarkJobs.sink("q22", (WithDirectories row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.auction;
                    sums[2] += row.bidder;
                    sums[3] += row.price;
                    sums[4] += row.channel.length();
                    sums[5] += row.dir1.charAt(0);
                    sums[6] += row.dir2.charAt(0);
                    sums[7] += row.dir3.charAt(0);
                }));
    }

    private static WithDirectories withDirectories(NexmarkEvents.Event bid) {
        String[] parts = bid.url().split("/");
        WithDirectories row = new WithDirectories();
        row.auction = bid.bidAuction();
        row.bidder = bid.bidder();
        row.price = bid.price();
        row.channel = bid.channel();
        row.dir1 = parts.length > 3 ? parts[3] : null;
        row.dir2 = parts.length > 4 ? parts[4] : null;
        row.dir3 = parts.length > 5 ? parts[5] : null;
        return row;
    }
}
