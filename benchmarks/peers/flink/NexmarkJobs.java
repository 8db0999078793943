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
import org.apache.flink.streaming.api.datastream.SingleOutputStreamOperator;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.windowing.WindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/** NEXMark q0 to q5, q7, q8. Every query takes its columns out of the events in the source's chain. */
final class NexmarkJobs {
    private static final Duration WINDOW = Duration.ofSeconds(10);
    private static final Duration SLIDE = Duration.ofSeconds(2);
    private static final long CHECKPOINT_MS = 1_000;
    private static final long WARM_UP = 1_000_000;
    private static final String SINK = "results";

    /** How many numbers each query's sink adds up: rows, then what midstream.bench.nexmark says is checked. */
    private static final Map<String, Integer> SUMS =
            Map.of("q0", 4, "q1", 4, "q2", 3, "q3", 2, "q4", 11, "q5", 3, "q7", 4, "q8", 2);

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
            cluster.run(settings, parallelism, env -> build(query, read(env, warmUp)));
            Cluster.Outcome outcome =
                    cluster.run(settings, parallelism, env -> build(query, read(env, events)));
            return new Report(options, options.variant(), parallelism)
                    .rate(events, outcome.seconds())
                    .put("result", outcome.sums(SINK))
                    .checkpoints(outcome);
        }
    }

    private static DataStream<NexmarkEvents.Event> read(StreamExecutionEnvironment env, long events) {
        int splits = env.getParallelism();
        IndexSource<NexmarkEvents.Event> source = new IndexSource<>(
                new NexmarkEvents(splits), Types.POJO(NexmarkEvents.Event.class), splits, events / splits, 0, 0);
        return env.fromSource(source, WatermarkStrategy.forMonotonousTimestamps(), "events");
    }

    private static DataStream<NexmarkEvents.Event> only(DataStream<NexmarkEvents.Event> events, int kind) {
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
            default -> q8(events);
        }
    }

    private static <T> Totals<T> sink(String query, Totals.Measure<T> measure) {
        return new Totals<>(SINK, SUMS.get(query), measure);
    }

    private static void bids(String query, DataStream<NexmarkEvents.Event> events) {
        double share = query.equals("q1") ? 0.908 : 1;
        only(events, NexmarkEvents.BID)
                .map(bid -> Tuple4.of(
                        NexmarkEvents.bidAuction(bid.n), NexmarkEvents.bidder(bid.n),
                        NexmarkEvents.price(bid.n) * share, bid.timeMs))
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
                .map(bid -> Tuple2.of(NexmarkEvents.bidAuction(bid.n), NexmarkEvents.price(bid.n)))
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
                .map(one -> new NexmarkJoins.Seller(NexmarkEvents.person(one.n), NexmarkEvents.name(one.n),
                        NexmarkEvents.city(one.n), NexmarkEvents.state(one.n)))
                .returns(Types.POJO(NexmarkJoins.Seller.class))
                .filter(one -> one.state.equals("OR") || one.state.equals("ID") || one.state.equals("CA"));
        DataStream<Tuple2<Long, Long>> auctions = only(events, NexmarkEvents.AUCTION)
                .filter(one -> NexmarkEvents.category(one.n) == 10)
                .map(one -> Tuple2.of(NexmarkEvents.seller(one.n), NexmarkEvents.auction(one.n)))
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
                .map(one -> Tuple3.of(NexmarkEvents.auction(one.n), NexmarkEvents.expiresMs(one.n),
                        NexmarkEvents.category(one.n)))
                .returns(Types.TUPLE(Types.LONG, Types.LONG, Types.INT));
        DataStream<Tuple2<Long, Long>> bids = only(events, NexmarkEvents.BID)
                .map(one -> Tuple2.of(NexmarkEvents.bidAuction(one.n), NexmarkEvents.price(one.n)))
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
                .map(bid -> NexmarkEvents.bidAuction(bid.n))
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
                .map(bid -> Tuple3.of((bid.timeMs / sizeMs + 1) * sizeMs, NexmarkEvents.price(bid.n),
                        new long[] {NexmarkEvents.bidAuction(bid.n), NexmarkEvents.bidder(bid.n)}))
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
                        ? Tuple3.of(NexmarkEvents.person(one.n), CREATED, NexmarkEvents.name(one.n))
                        : Tuple3.of(NexmarkEvents.seller(one.n), SOLD, ""))
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
}
