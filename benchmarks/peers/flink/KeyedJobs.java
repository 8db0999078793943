package midstream.peers;

import java.time.Duration;
import java.util.Map;
import java.util.function.Consumer;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.windowing.assigners.SlidingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.assigners.WindowAssigner;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;

/**
 * The events of `window` behind a keyed exchange: window, sliding, strings, exchange. The time of an event is its record's
 * timestamp, which Flink sends along anyway, and not a column as well: that favours Flink.
 */
final class KeyedJobs {
    private static final int EVENTS_PER_MS = 50;
    private static final int WINDOW_MS = 10_000;
    private static final int SLIDE_MS = 2_000;
    private static final int PAYLOAD = 100;
    private static final long CHECKPOINT_MS = 1_000;
    private static final long WARM_UP = 2_000_000;

    private KeyedJobs() {}

    /** Key and value of event i = split * rows + j of `events`, `rows` in each split. */
    static final class Numbers implements IndexSource.Generator<Tuple2<Long, Double>> {
        static final TypeInformation<Tuple2<Long, Double>> TYPE = Types.TUPLE(Types.LONG, Types.DOUBLE);
        private final long half;
        private final long rows;
        private final long keys;

        Numbers(long events, int splits, long keys) {
            half = events / 2;
            rows = events / splits;
            this.keys = keys;
        }

        @Override
        public Tuple2<Long, Double> make(int split, long j) {
            long i = split * rows + j;
            return Tuple2.of(key(i, keys), value(i));
        }

        @Override
        public long timestampMs(int split, long j) {
            return (split * rows + j) % half / EVENTS_PER_MS;
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
            return Tuple3.of(user(key(i, 10_000)), value(i), payload(i));
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

    private static final byte[] HEX = "0123456789abcdef".getBytes();

    /** The ten last hex digits of i, ten times. */
    @SuppressWarnings("deprecation")
    private static String payload(long i) {
        byte[] text = new byte[PAYLOAD];
        for (int at = 0; at < 10; at++) {
            text[9 - at] = HEX[(int) (i >> (4 * at)) & 15];
        }
        for (int at = 10; at < PAYLOAD; at += 10) {
            System.arraycopy(text, 0, text, at, 10);
        }
        return new String(text, 0);
    }

    /** The exact sum of all values. */
    static double valueSum(long events) {
        long rest = events % 1000;
        return 0.5 * (events / 1000 * 499_500 + rest * (rest - 1) / 2);
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
            one.n += other.n;
            one.sum += other.sum;
            return one;
        }
    }

    /** What windows of `strings` hold: the payload of the last row too. */
    public static final class WithPayload {
        public long n;
        public double sum;
        public String last = "";
    }

    static final class Last implements AggregateFunction<Tuple3<String, Double, String>, WithPayload, WithPayload> {
        @Override
        public WithPayload createAccumulator() {
            return new WithPayload();
        }

        @Override
        public WithPayload add(Tuple3<String, Double, String> row, WithPayload found) {
            found.n++;
            found.sum += row.f1;
            found.last = row.f2;
            return found;
        }

        @Override
        public WithPayload getResult(WithPayload found) {
            return found;
        }

        @Override
        public WithPayload merge(WithPayload one, WithPayload other) {
            one.n += other.n;
            one.sum += other.sum;
            one.last = other.last;
            return one;
        }
    }

    static Report window(Options options) throws Exception {
        return windows(options, 10_000, TumblingEventTimeWindows.of(Duration.ofMillis(WINDOW_MS)), 20_000_000, 1);
    }

    /** The variant is how many keys: 1,000,000 unless it says so; 1 is the base of the memory figures. */
    static Report sliding(Options options) throws Exception {
        long keys = options.variant().isEmpty() ? 1_000_000 : Long.parseLong(options.variant());
        WindowAssigner<Object, TimeWindow> assigner =
                SlidingEventTimeWindows.of(Duration.ofMillis(WINDOW_MS), Duration.ofMillis(SLIDE_MS));
        return windows(options, keys, assigner, 10_000_000, WINDOW_MS / SLIDE_MS);
    }

    /** Every event is in `times` windows. */
    private static Report windows(
            Options options, long keys, WindowAssigner<Object, TimeWindow> assigner, long usual, int times)
            throws Exception {
        long events = options.eventsOr(usual);
        Job job = (env, n, seconds) -> {
            DataStream<Tuple2<Long, Double>> rows =
                    read(env, new Numbers(n, env.getParallelism(), keys), Numbers.TYPE, n, seconds);
            if (seconds > 0) {
                count(rows, row -> row.f1);
            }
            rows.keyBy(row -> row.f0, Types.LONG)
                    .window(assigner)
                    .aggregate(new CountingAndSumming(), Types.POJO(CountAndSum.class), Types.POJO(CountAndSum.class))
                    .flatMap(new Totals<CountAndSum>("results", 3, (row, sums) -> {
                        sums[0] += 1;
                        sums[1] += row.n;
                        sums[2] += row.sum;
                    }));
        };
        try (HeapAfterGc heap = new HeapAfterGc()) {
            Cluster.Outcome outcome = warmAndRun(options, events, job, heap);
            double[] results = outcome.sums("results");
            double[] read = read(options, outcome, events);
            Report.require("the sum of all counts", read[0] * times, results[1], 0);
            Report.require("the sum of all sums", read[1] * times, results[2], 0);
            return new Report(options, options.variant(), options.parallelismOr(2))
                    .rate((long) read[0], outcome.seconds())
                    .put("bounded", options.maxSeconds() > 0)
                    .put("keys", keys)
                    .put("result_rows", (long) results[0])
                    .heap(heap)
                    .checkpoints(outcome);
        }
    }

    static Report strings(Options options) throws Exception {
        long events = options.eventsOr(10_000_000);
        Job job = (env, n, seconds) -> {
            DataStream<Tuple3<String, Double, String>> rows =
                    read(env, new Texts(n, env.getParallelism()), Texts.TYPE, n, seconds);
            if (seconds > 0) {
                count(rows, row -> row.f1);
            }
            rows.keyBy(row -> row.f0, Types.STRING)
                    .window(TumblingEventTimeWindows.of(Duration.ofMillis(WINDOW_MS)))
                    .aggregate(new Last(), Types.POJO(WithPayload.class), Types.POJO(WithPayload.class))
                    .flatMap(new Totals<WithPayload>("results", 4, (row, sums) -> {
                        sums[0] += 1;
                        sums[1] += row.n;
                        sums[2] += row.sum;
                        sums[3] += row.last.length();
                    }));
        };
        try (HeapAfterGc heap = new HeapAfterGc()) {
            Cluster.Outcome outcome = warmAndRun(options, events, job, heap);
            double[] results = outcome.sums("results");
            double[] read = read(options, outcome, events);
            Report.require("the sum of all counts", read[0], results[1], 0);
            Report.require("the sum of all sums", read[1], results[2], 0);
            Report.require("the length of all payloads", PAYLOAD * results[0], results[3], 0);
            return new Report(options, options.variant(), options.parallelismOr(2))
                    .rate((long) read[0], outcome.seconds())
                    .put("bounded", options.maxSeconds() > 0)
                    .put("result_rows", (long) results[0])
                    .heap(heap)
                    .checkpoints(outcome);
        }
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
            Report.require("the rows that arrived", events, outcome.sums("arrived")[0], 0);
            return new Report(options, options.variant(), parallelism).rate(events, outcome.seconds());
        }
    }

    /** Builds a job over so many events that reads for so many seconds at most (0: all of them). */
    interface Job {
        void build(StreamExecutionEnvironment env, long events, double seconds);
    }

    private static Cluster.Outcome warmAndRun(Options options, long events, Job job, HeapAfterGc heap)
            throws Exception {
        int parallelism = options.parallelismOr(2);
        try (Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(Map.of()))) {
            Configuration settings = Settings.ofJob(options.directory(), CHECKPOINT_MS, Map.of());
            Consumer<StreamExecutionEnvironment> warmUp = env -> job.build(env, Math.min(WARM_UP, events), 0);
            cluster.run(settings, parallelism, warmUp);
            heap.reset();
            return cluster.run(settings, parallelism, env -> job.build(env, events, options.maxSeconds()));
        }
    }

    /** How many events have been read and the sum of their values: all of them, unless the clock ended the run. */
    private static double[] read(Options options, Cluster.Outcome outcome, long events) {
        return options.maxSeconds() > 0 ? outcome.sums("read") : new double[] {events, valueSum(events)};
    }

    private static <T> DataStream<T> read(
            StreamExecutionEnvironment env,
            IndexSource.Generator<T> generator,
            TypeInformation<T> type,
            long events,
            double seconds) {
        int splits = env.getParallelism();
        IndexSource<T> source = new IndexSource<>(generator, type, splits, events / splits, 0, seconds);
        return env.fromSource(source, WatermarkStrategy.forMonotonousTimestamps(), "events");
    }

    private interface Value<T> extends java.io.Serializable {
        double of(T row);
    }

    /** Counts and sums up what has been read, for a run that the clock ends. */
    private static <T> void count(DataStream<T> rows, Value<T> value) {
        rows.flatMap(new Totals<T>("read", 2, (row, sums) -> {
            sums[0] += 1;
            sums[1] += value.of(row);
        }));
    }
}
