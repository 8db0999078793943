package midstream.peers;

import java.time.Duration;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.ReduceFunction;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;

/** q15 to q18: reports of a day, as it ends. */
final class NexmarkReports {
    private static final Duration DAY = Duration.ofDays(1);
    private static final long MINUTE_MS = 60_000;
    private static final int RANKS = 3;

    private NexmarkReports() {}

    /** Low, middle and high prices. */
    private static int rank(long price) {
        return price < 10_000 ? 0 : price < 1_000_000 ? 1 : 2;
    }

    /** A POJO: a bid of q15 and q16. */
    public static final class Bid {
        public long auction;
        public long bidder;
        public long price;
        public long timeMs;
        public String channel;

        static Bid of(NexmarkEvents.Event event, boolean withChannel) {
            Bid one = new Bid();
            one.auction = event.bidAuction();
            one.bidder = event.bidder();
            one.price = event.price();
            one.timeMs = event.timeMs;
            one.channel = withChannel ? event.channel() : "";
            return one;
        }
    }

    /**
     * A POJO: which ranks were seen of each of some numbers above 0, and how many numbers there are of each rank. An
     * open hash table of longs: a number and a bit for each rank. A map of boxed numbers takes several times as much
     * memory and time, also when a checkpoint copies it.
     */
    public static final class Distinct {
        private static final int FIRST_LENGTH = 8;

        public long[] table = new long[FIRST_LENGTH];
        public long total;
        public long[] ofRank = new long[RANKS];

        void add(long number, int rank) {
            int at = find(table, number);
            if (table[at] == 0) {
                total++;
                table[at] = number << RANKS;
            }
            long bit = 1L << rank;
            if ((table[at] & bit) == 0) {
                table[at] |= bit;
                ofRank[rank]++;
            }
            if (total * 2 > table.length) {
                grow();
            }
        }

        private void grow() {
            long[] larger = new long[table.length * 2];
            for (long entry : table) {
                if (entry != 0) {
                    larger[find(larger, entry >>> RANKS)] = entry;
                }
            }
            table = larger;
        }

        /** Where a number is, or would be. */
        private static int find(long[] table, long number) {
            int mask = table.length - 1;
            int at = (int) ((number * 0x9E3779B97F4A7C15L) >>> 32) & mask;
            while (table[at] != 0 && table[at] >>> RANKS != number) {
                at = (at + 1) & mask;
            }
            return at;
        }
    }

    /** A POJO. */
    public static final class Statistics {
        public String channel = "";
        public long lastMs;
        public long bids;
        public long[] bidsOfRank = new long[RANKS];
        public Distinct bidders = new Distinct();
        public Distinct auctions = new Distinct();

        /** To `sums`, from `at` on. */
        void addTo(double[] sums, int at) {
            at = put(sums, at, bids, bidsOfRank);
            at = put(sums, at, bidders.total, bidders.ofRank);
            put(sums, at, auctions.total, auctions.ofRank);
        }

        private static int put(double[] sums, int at, long total, long[] ofRank) {
            sums[at++] += total;
            for (long count : ofRank) {
                sums[at++] += count;
            }
            return at;
        }
    }

    private static final class Reporting implements AggregateFunction<Bid, Statistics, Statistics> {
        @Override
        public Statistics createAccumulator() {
            return new Statistics();
        }

        @Override
        public Statistics add(Bid bid, Statistics found) {
            int rank = rank(bid.price);
            found.channel = bid.channel;
            found.lastMs = Math.max(found.lastMs, bid.timeMs);
            found.bids++;
            found.bidsOfRank[rank]++;
            found.bidders.add(bid.bidder, rank);
            found.auctions.add(bid.auction, rank);
            return found;
        }

        @Override
        public Statistics getResult(Statistics found) {
            return found;
        }

        @Override
        public Statistics merge(Statistics one, Statistics other) {
            throw new UnsupportedOperationException("these windows do not merge");
        }
    }

    private static DataStream<Bid> bids(DataStream<NexmarkEvents.Event> events, boolean withChannel) {
        return NexmarkJobs.only(events, NexmarkEvents.BID)
                .map(event -> Bid.of(event, withChannel))
                .returns(Types.POJO(Bid.class));
    }

    static void q15(DataStream<NexmarkEvents.Event> events) {
        TypeInformation<Statistics> type = Types.POJO(Statistics.class);
        bids(events, false)
                .windowAll(TumblingEventTimeWindows.of(DAY))
                .aggregate(new Reporting(), type, type)
                .flatMap(NexmarkJobs.sink("q15", (Statistics row, double[] sums) -> {
                    sums[0] += 1;
                    row.addTo(sums, 1);
                }))
                .setParallelism(1);
    }

    static void q16(DataStream<NexmarkEvents.Event> events) {
        TypeInformation<Statistics> type = Types.POJO(Statistics.class);
        bids(events, true)
                .keyBy(bid -> bid.channel, Types.STRING)
                .window(TumblingEventTimeWindows.of(DAY))
                .aggregate(new Reporting(), type, type)
                .flatMap(NexmarkJobs.sink("q16", (Statistics row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.channel.length();
                    sums[2] += row.lastMs / MINUTE_MS * MINUTE_MS;
                    row.addTo(sums, 3);
                }));
    }

    /** A POJO: what q17 reports of an auction. */
    public static final class Prices {
        public long auction;
        public long bids;
        public long low;
        public long middle;
        public long high;
        public long least = Long.MAX_VALUE;
        public long most;
        public long total;
    }

    private static final class Pricing implements AggregateFunction<Tuple2<Long, Long>, Prices, Prices> {
        @Override
        public Prices createAccumulator() {
            return new Prices();
        }

        @Override
        public Prices add(Tuple2<Long, Long> bid, Prices found) {
            long price = bid.f1;
            found.auction = bid.f0;
            found.bids++;
            switch (rank(price)) {
                case 0 -> found.low++;
                case 1 -> found.middle++;
                default -> found.high++;
            }
            found.least = Math.min(found.least, price);
            found.most = Math.max(found.most, price);
            found.total += price;
            return found;
        }

        @Override
        public Prices getResult(Prices found) {
            return found;
        }

        @Override
        public Prices merge(Prices one, Prices other) {
            throw new UnsupportedOperationException("these windows do not merge");
        }
    }

    static void q17(DataStream<NexmarkEvents.Event> events) {
        TypeInformation<Prices> type = Types.POJO(Prices.class);
        NexmarkJobs.only(events, NexmarkEvents.BID)
                .map(bid -> Tuple2.of(bid.bidAuction(), bid.price()))
                .returns(Types.TUPLE(Types.LONG, Types.LONG))
                .keyBy(bid -> bid.f0, Types.LONG)
                .window(TumblingEventTimeWindows.of(DAY))
                .aggregate(new Pricing(), type, type)
                .flatMap(NexmarkJobs.sink("q17", (Prices row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.auction;
                    sums[2] += row.bids;
                    sums[3] += row.low;
                    sums[4] += row.middle;
                    sums[5] += row.high;
                    sums[6] += row.least;
                    sums[7] += row.most;
                    sums[8] += row.total / row.bids;
                    sums[9] += row.total;
                }));
    }

    /** Of two bids of the same time the one that came later: those of a millisecond are of one subtask. */
    private static final class Later implements ReduceFunction<NexmarkWinners.WholeBid> {
        @Override
        public NexmarkWinners.WholeBid reduce(NexmarkWinners.WholeBid found, NexmarkWinners.WholeBid bid) {
            return bid.timeMs >= found.timeMs ? bid : found;
        }
    }

    static void q18(DataStream<NexmarkEvents.Event> events) {
        NexmarkJobs.only(events, NexmarkEvents.BID)
                .map(one -> NexmarkWinners.WholeBid.of(one))
                .returns(Types.POJO(NexmarkWinners.WholeBid.class))
                .keyBy(bid -> Tuple2.of(bid.bidder, bid.auction), Types.TUPLE(Types.LONG, Types.LONG))
                .window(TumblingEventTimeWindows.of(DAY))
                .reduce(new Later())
                .flatMap(NexmarkJobs.sink("q18", (NexmarkWinners.WholeBid row, double[] sums) -> {
                    sums[0] += 1;
                    sums[1] += row.bidder;
                    sums[2] += row.auction;
                    sums[3] += row.price;
                    sums[4] += row.channel.length();
                    sums[5] += row.url.length();
                    sums[6] += row.timeMs;
                    sums[7] += row.extra.length();
                }));
    }
}
