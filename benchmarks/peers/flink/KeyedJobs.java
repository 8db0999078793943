package midstream.peers;

import java.time.Duration;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichFlatMapFunction;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.WindowAssigner;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/**
 * The events of `window` behind a keyed exchange: window, sliding, strings, exchange. The time of an event is its record's
 * timestamp, which Flink sends along anyway, and not a column as well: that favours Flink.
 */
final class KeyedJobs {
    private static final int EVENTS_PER_MS = 50;
    private static final int WINDOW_MS = 10_000;
    private static final int SLIDE_MS = 2_000;
    private static final long CHECKPOINT_MS = 1_000;
    private static final long WARM_UP = 2_000_000;
    private static final double WARM_UP_S_MAX = 5;
    private static final int SUBTASKS_MAX = 64;
    private static final long HOUR_MS = 3_600_000;
    static final long HOUR_KEYS = 1_000_000;
    static final long STRETCH = 360;

    private KeyedJobs() {}

    /** Key and value of event i = split * rows + j of `events`, `rows` in each split. */
    static final class Numbers implements IndexSource.Generator<Tuple2<Long, Double>> {
        static final TypeInformation<Tuple2<Long, Double>> TYPE = Types.TUPLE(Types.LONG, Types.DOUBLE);
        private final long half;
        private final long rows;
        private final long keys;
        private final long stretch;

        Numbers(long events, int splits, long keys) {
            this(events, splits, keys, 1);
        }

        /** `stretch`: event time passes so many times as fast. */
        Numbers(long events, int splits, long keys, long stretch) {
            half = events / 2;
            rows = events / splits;
            this.keys = keys;
            this.stretch = stretch;
        }

        @Override
        public Tuple2<Long, Double> make(int split, long j) {
            long i = split * rows + j;
            return Tuple2.of(key(i, keys), value(i));
        }

        @Override
        public long timestampMs(int split, long j) {
            return (split * rows + j) % half / EVENTS_PER_MS * stretch;
        }
    }

    /** The same with a key of text and 100 characters more. */
    static final class Texts implements IndexSource.Generator<Tuple3<String, Double, String>> {
        static final TypeInformation<Tuple3<String, Double, String>> TYPE =
                Types.TUPLE(Types.STRING, Types.DOUBLE, Types.STRING);
        private final long half;
        private final long rows;

        Texts(long events, int splits) {
            half = events / 2;
            rows = events / splits;
        }

        @Override
        public Tuple3<String, Double, String> make(int split, long j) {
            long i = split * rows + j;
            return Tuple3.of(user(key(i, 10_000)), value(i), PAYLOAD[(int) (i % PAYLOADS)]);
        }

        @Override
        public long timestampMs(int split, long j) {
            return (split * rows + j) % half / EVENTS_PER_MS;
        }
    }

    static long key(long i, long keys) {
        return ((i * 2654435761L) & 0xffffffffL) % keys;
    }

    static double value(long i) {
        return i % 1000 * 0.5;
    }

    @SuppressWarnings("deprecation") // the one constructor that does not decode
    private static String user(long key) {
        byte[] text = {'u', 's', 'e', 'r', '-', '0', '0', '0', '0', '0', '0'};
        for (int at = text.length - 1; key > 0; at--, key /= 10) {
            text[at] += (byte) (key % 10);
        }
        return new String(text, 0);
    }

    private static final int PAYLOADS = 65_536;
    private static final String[] PAYLOAD = new String[PAYLOADS];

    static {
        for (int i = 0; i < PAYLOADS; i++) {
            PAYLOAD[i] = String.format("%04x", i).repeat(25);
        }
    }

    /** A POJO: Flink's serialiser of classes with public fields, and mutable. */
    public static final class CountAndSum {
        public long n;
        public double sum;
    }

    static final class CountingAndSumming
            implements AggregateFunction<Tuple2<Long, Double>, CountAndSum, CountAndSum> {
        @Override
        public CountAndSum createAccumulator() {
            return new CountAndSum();
        }

        @Override
        public CountAndSum add(Tuple2<Long, Double> row, CountAndSum found) {
            found.n++;
            found.sum += row.f1;
            return found;
        }

        @Override
        public CountAndSum getResult(CountAndSum found) {
            return found;
        }

        @Override
        public CountAndSum merge(CountAndSum one, CountAndSum other) {
            throw new UnsupportedOperationException("these windows do not merge");
        }
    }

    /** What windows of `strings` hold: the largest payload too. */
    public static final class WithPayload {
        public long n;
        public double sum;
        public String largest = "";
    }

    static final class Largest implements AggregateFunction<Tuple3<String, Double, String>, WithPayload, WithPayload> {
        @Override
        public WithPayload createAccumulator() {
            return new WithPayload();
        }

        @Override
        public WithPayload add(Tuple3<String, Double, String> row, WithPayload found) {
            found.n++;
            found.sum += row.f1;
            if (row.f2.compareTo(found.largest) > 0) {
                found.largest = row.f2;
            }
            return found;
        }

        @Override
        public WithPayload getResult(WithPayload found) {
            return found;
        }

        @Override
        public WithPayload merge(WithPayload one, WithPayload other) {
            throw new UnsupportedOperationException("these windows do not merge");
        }
    }

    static Report window(Options options) throws Exception {
        return numbers(options, 20_000_000, 10_000, TumblingEventTimeWindows.of(Duration.ofMillis(WINDOW_MS)));
    }

    static Report windowOfManyKeys(Options options) throws Exception {
        return numbers(options, 20_000_000, 1_000_000, TumblingEventTimeWindows.of(Duration.ofMillis(WINDOW_MS)));
    }

    static Report sliding(Options options) throws Exception {
        return numbers(options, 10_000_000, 1_000_000,
                SlidingEventTimeWindows.of(Duration.ofMillis(WINDOW_MS), Duration.ofMillis(SLIDE_MS)));
    }

    private static Report numbers(
            Options options, long usual, long keys, WindowAssigner<Object, TimeWindow> assigner) throws Exception {
        return warmAndRun(options, usual, (env, n, seconds) ->
                read(env, new Numbers(n, env.getParallelism(), keys), Numbers.TYPE, n, seconds)
                        .keyBy(row -> row.f0, Types.LONG)
                        .window(assigner)
                        .aggregate(new CountingAndSumming(), Types.POJO(CountAndSum.class), Types.POJO(CountAndSum.class))
                        .flatMap(new Totals<CountAndSum>("results", 3, (row, sums) -> {
                            sums[0] += 1;
                            sums[1] += row.n;
                            sums[2] += row.sum;
                        })));
    }

    /** The sum of a key's values within an hour of its first one. */
    static final class HourTotals extends KeyedProcessFunction<Long, Tuple2<Long, Double>, Double> {
        private transient ValueState<Double> total;

        @Override
        public void open(OpenContext context) {
            total = getRuntimeContext().getState(new ValueStateDescriptor<>("total", Types.DOUBLE));
        }

        @Override
        public void processElement(Tuple2<Long, Double> row, Context context, Collector<Double> out) throws Exception {
            Double found = total.value();
            if (found == null) {
                found = 0.0;
                context.timerService().registerEventTimeTimer(context.timestamp() + HOUR_MS);
            }
            total.update(found + row.f1);
        }

        @Override
        public void onTimer(long time, OnTimerContext context, Collector<Double> out) throws Exception {
            out.collect(total.value());
            total.clear();
        }
    }

    static Report keyedProcess(Options options) throws Exception {
        return warmAndRun(options, 4_000_000, (env, n, seconds) ->
                read(env, new Numbers(n, env.getParallelism(), HOUR_KEYS, STRETCH), Numbers.TYPE, n, seconds)
                        .keyBy(row -> row.f0, Types.LONG)
                        .process(new HourTotals(), Types.DOUBLE)
                        .flatMap(new Totals<Double>("results", 2, (total, sums) -> {
                            sums[0] += 1;
                            sums[1] += total;
                        })));
    }

    static Report strings(Options options) throws Exception {
        return warmAndRun(options, 10_000_000, (env, n, seconds) ->
                read(env, new Texts(n, env.getParallelism()), Texts.TYPE, n, seconds)
                        .keyBy(row -> row.f0, Types.STRING)
                        .window(TumblingEventTimeWindows.of(Duration.ofMillis(WINDOW_MS)))
                        .aggregate(new Largest(), Types.POJO(WithPayload.class), Types.POJO(WithPayload.class))
                        .flatMap(new Totals<WithPayload>("results", 4, (row, sums) -> {
                            sums[0] += 1;
                            sums[1] += row.n;
                            sums[2] += row.sum;
                            sums[3] += Integer.parseInt(row.largest, 0, 4, 16);
                        })));
    }

    /** No checkpoints, as in midstream's. */
    static Report exchange(Options options) throws Exception {
        long events = options.eventsOr(20_000_000);
        Job job = (env, n, seconds) -> {
            read(env, new Numbers(n, env.getParallelism(), 10_000), Numbers.TYPE, n, seconds)
                    .keyBy(row -> row.f0, Types.LONG)
                    .flatMap(new Totals<Tuple2<Long, Double>>("arrived", 1, (row, sums) -> sums[0] += 1));
        };
        int parallelism = options.parallelismOr(2);
        try (Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(Map.of()))) {
            Configuration settings = Settings.ofJob(options.directory(), 0, Map.of());
            cluster.run(settings, parallelism, env -> job.build(env, Math.min(WARM_UP, events), 0));
            Cluster.Outcome outcome = cluster.run(settings, parallelism, env -> job.build(env, events, 0));
            return new Report(options, options.variant(), parallelism)
                    .rate(events, outcome.seconds())
                    .put("result", outcome.sums("arrived"));
        }
    }

    /** Builds a job over so many events that reads for so many seconds at most (0: all of them). */
    interface Job {
        void build(StreamExecutionEnvironment env, long events, double seconds);
    }

    /** `events`: all that there are; `read`, of each split, if the clock ends the run. */
    static Report warmAndRun(Options options, long usual, Job job) throws Exception {
        int parallelism = options.parallelismOr(2);
        long events = options.eventsOr(usual);
        try (HeapAfterGc heap = new HeapAfterGc();
                Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(Map.of()))) {
            Configuration settings = Settings.ofJob(options.directory(), CHECKPOINT_MS, Map.of());
            double warmUpS = Math.min(WARM_UP_S_MAX, options.maxSeconds());
            cluster.run(settings, parallelism, env -> job.build(env, Math.min(WARM_UP, events), warmUpS));
            heap.reset();
            Cluster.Outcome outcome =
                    cluster.run(settings, parallelism, env -> job.build(env, events, options.maxSeconds()));
            Report report = new Report(options, options.variant(), parallelism)
                    .rate(events, outcome.seconds())
                    .put("result", outcome.sums("results"))
                    .heap(heap)
                    .checkpoints(outcome);
            return options.maxSeconds() > 0
                    ? report.put("read", java.util.Arrays.copyOf(outcome.sums("read"), parallelism))
                    : report;
        }
    }

    static <T> DataStream<T> read(
            StreamExecutionEnvironment env,
            IndexSource.Generator<T> generator,
            TypeInformation<T> type,
            long events,
            double seconds) {
        int splits = env.getParallelism();
        IndexSource<T> source = new IndexSource<>(generator, type, splits, events / splits, 0, seconds);
        DataStream<T> rows = env.fromSource(source, WatermarkStrategy.forMonotonousTimestamps(), "events");
        if (seconds > 0) {
            count(rows);
        }
        return rows;
    }

    /** Counts what each subtask reads, under `read`: what must come out if the clock ends the run. */
    static <T> void count(DataStream<T> rows) {
        rows.flatMap(new RichFlatMapFunction<T, Long>() {
            private final Totals.Sums sums = new Totals.Sums(SUBTASKS_MAX);
            private int subtask;

            @Override
            public void open(OpenContext context) {
                subtask = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
                getRuntimeContext().addAccumulator("read", sums);
            }

            @Override
            public void flatMap(T row, Collector<Long> out) {
                sums.sums[subtask]++;
            }
        }).returns(Types.LONG);
    }
}
