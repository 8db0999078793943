package midstream.peers;

import java.time.Duration;
import java.util.ArrayList;
import java.util.List;
import java.util.TreeMap;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.state.ListState;
import org.apache.flink.api.common.state.ListStateDescriptor;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.api.java.tuple.Tuple4;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.datastream.KeyedStream;
import org.apache.flink.streaming.api.functions.KeyedProcessFunction;
import org.apache.flink.streaming.api.functions.co.KeyedCoProcessFunction;
import org.apache.flink.streaming.api.functions.co.ProcessJoinFunction;
import org.apache.flink.util.Collector;

/**
 * What midstream_lab.bench.operators does: running aggregate, duplicates, interval join, as-of join. The time of an
 * event is its record's timestamp, and not a column as well: that favours Flink.
 */
final class OperatorJobs {
    private static final long USUAL = 10_000_000;
    private static final int EVENTS_PER_MS = 50;
    private static final int LANES = 2;
    private static final long KEYS = 1_000_000;
    private static final long WITHIN_MS = 10_000;
    private static final long REPEATED_AFTER = 40_000;
    private static final long VERSIONED_KEYS = 10_000;

    private OperatorJobs() {}

    /** Event i of `events`: its time, key and value, as midstream_lab.bench.operators defines them. */
    abstract static class Events<T> implements IndexSource.Generator<T> {
        final long half;
        private final long rows;

        Events(long events, int splits) {
            half = events / LANES;
            rows = events / splits;
        }

        abstract T make(long i);

        long ms(long i) {
            return i % half / EVENTS_PER_MS;
        }

        @Override
        public T make(int split, long j) {
            return make(split * rows + j);
        }

        @Override
        public long timestampMs(int split, long j) {
            return ms(split * rows + j);
        }
    }

    private static final TypeInformation<Tuple2<Long, Double>> ROW = Types.TUPLE(Types.LONG, Types.DOUBLE);

    /** Key and value; the value depends on the key. */
    static final class Keyed extends Events<Tuple2<Long, Double>> {
        Keyed(long events, int splits) {
            super(events, splits);
        }

        @Override
        Tuple2<Long, Double> make(long i) {
            long key = KeyedJobs.key(i, KEYS);
            return Tuple2.of(key, KeyedJobs.value(key));
        }
    }

    /** Number and value; one event in four has the number of one before it. */
    static final class Repeated extends Events<Tuple2<Long, Double>> {
        Repeated(long events, int splits) {
            super(events, splits);
        }

        @Override
        Tuple2<Long, Double> make(long i) {
            long earlier = i - 1 - ((i * 2654435761L) & 0xffffffffL) % REPEATED_AFTER;
            return Tuple2.of(i % 4 == 3 && earlier >= i - i % half ? earlier : i, KeyedJobs.value(i));
        }
    }

    /** Side, key and value. Never serialised: sides are told apart in the source's chain. */
    static final class Sided extends Events<Tuple3<Integer, Long, Double>> {
        static final TypeInformation<Tuple3<Integer, Long, Double>> TYPE =
                Types.TUPLE(Types.INT, Types.LONG, Types.DOUBLE);
        private final long keys;
        private final int rightEvery;
        private final boolean isVersioned;

        Sided(long events, int splits, long keys, int rightEvery, boolean isVersioned) {
            super(events, splits);
            this.keys = keys;
            this.rightEvery = rightEvery;
            this.isVersioned = isVersioned;
        }

        @Override
        Tuple3<Integer, Long, Double> make(long i) {
            long key = KeyedJobs.key(i, keys);
            boolean isRight = i % rightEvery == 0;
            return Tuple3.of(isRight ? 1 : 0, key, KeyedJobs.value(isRight && isVersioned ? key * 7 + ms(i) : i));
        }
    }

    private static KeyedStream<Tuple2<Long, Double>, Long> side(DataStream<Tuple3<Integer, Long, Double>> events, int side) {
        return events.filter(event -> event.f0 == side)
                .map(event -> Tuple2.of(event.f1, event.f2))
                .returns(ROW)
                .keyBy(row -> row.f0, Types.LONG);
    }

    // ---- running aggregate ----

    static final class Running
            extends KeyedProcessFunction<Long, Tuple2<Long, Double>, Tuple3<Long, Long, Double>> {
        private transient ValueState<KeyedJobs.CountAndSum> state;
        private final Tuple3<Long, Long, Double> made = new Tuple3<>();

        @Override
        public void open(OpenContext context) {
            state = getRuntimeContext()
                    .getState(new ValueStateDescriptor<>("totals", Types.POJO(KeyedJobs.CountAndSum.class)));
        }

        @Override
        public void processElement(
                Tuple2<Long, Double> row, Context context, Collector<Tuple3<Long, Long, Double>> out)
                throws Exception {
            KeyedJobs.CountAndSum found = state.value();
            if (found == null) {
                found = new KeyedJobs.CountAndSum();
            }
            found.n++;
            found.sum += row.f1;
            state.update(found);
            made.setFields(row.f0, found.n, found.sum);
            out.collect(made);
        }
    }

    static Report runningAggregate(Options options) throws Exception {
        return KeyedJobs.warmAndRun(options, USUAL, (env, n, seconds) ->
                KeyedJobs.read(env, new Keyed(n, env.getParallelism()), ROW, n, seconds)
                        .keyBy(row -> row.f0, Types.LONG)
                        .process(new Running(), Types.TUPLE(Types.LONG, Types.LONG, Types.DOUBLE))
                        .flatMap(new Totals<Tuple3<Long, Long, Double>>("results", 3, (row, sums) -> {
                            sums[0] += 1;
                            sums[1] += row.f1;
                            sums[2] += row.f2;
                        })));
    }

    // ---- duplicates ----

    static final class FirstWithin extends KeyedProcessFunction<Long, Tuple2<Long, Double>, Tuple2<Long, Double>> {
        /** The time of the row that was kept last. */
        private transient ValueState<Long> kept;

        @Override
        public void open(OpenContext context) {
            kept = getRuntimeContext().getState(new ValueStateDescriptor<>("kept", Types.LONG));
        }

        @Override
        public void processElement(Tuple2<Long, Double> row, Context context, Collector<Tuple2<Long, Double>> out)
                throws Exception {
            Long before = kept.value();
            long timeMs = context.timestamp();
            if (before == null || Math.abs(timeMs - before) > WITHIN_MS) {
                kept.update(timeMs);
                context.timerService().registerEventTimeTimer(timeMs + WITHIN_MS);
                out.collect(row);
            }
        }

        @Override
        public void onTimer(long timeMs, OnTimerContext context, Collector<Tuple2<Long, Double>> out)
                throws Exception {
            Long before = kept.value();
            if (before != null && before + WITHIN_MS <= timeMs) {
                kept.clear();
            }
        }
    }

    static Report dropDuplicates(Options options) throws Exception {
        return KeyedJobs.warmAndRun(options, USUAL, (env, n, seconds) ->
                KeyedJobs.read(env, new Repeated(n, env.getParallelism()), ROW, n, seconds)
                        .keyBy(row -> row.f0, Types.LONG)
                        .process(new FirstWithin(), ROW)
                        .flatMap(new Totals<Tuple2<Long, Double>>("results", 2, (row, sums) -> {
                            sums[0] += 1;
                            sums[1] += row.f0;
                        })));
    }

    // ---- interval join ----

    static final class Pair
            extends ProcessJoinFunction<Tuple2<Long, Double>, Tuple2<Long, Double>, Tuple3<Long, Double, Double>> {
        private final Tuple3<Long, Double, Double> made = new Tuple3<>();

        @Override
        public void processElement(
                Tuple2<Long, Double> left,
                Tuple2<Long, Double> right,
                Context context,
                Collector<Tuple3<Long, Double, Double>> out) {
            made.setFields(left.f0, left.f1, right.f1);
            out.collect(made);
        }
    }

    static Report intervalJoin(Options options) throws Exception {
        return KeyedJobs.warmAndRun(options, USUAL, (env, n, seconds) -> {
            DataStream<Tuple3<Integer, Long, Double>> events = KeyedJobs.read(
                    env, new Sided(n, env.getParallelism(), KEYS, 3, false), Sided.TYPE, n, seconds);
            side(events, 0)
                    .intervalJoin(side(events, 1))
                    .between(Duration.ZERO, Duration.ofMillis(WITHIN_MS))
                    .process(new Pair(), Types.TUPLE(Types.LONG, Types.DOUBLE, Types.DOUBLE))
                    .flatMap(new Totals<Tuple3<Long, Double, Double>>("results", 4, (row, sums) -> {
                        sums[0] += 1;
                        sums[1] += row.f0;
                        sums[2] += row.f1;
                        sums[3] += row.f2;
                    }));
        });
    }

    // ---- as-of join ----

    /**
     * An event-time temporal join as Flink's SQL has it, without the cost of its rows: both sides wait until the
     * watermark has passed them, with one timer of a key at a time.
     */
    static final class NewestVersion extends KeyedCoProcessFunction<
            Long, Tuple2<Long, Double>, Tuple2<Long, Double>, Tuple4<Long, Long, Double, Double>> {
        static final TypeInformation<Tuple4<Long, Long, Double, Double>> TYPE =
                Types.TUPLE(Types.LONG, Types.LONG, Types.DOUBLE, Types.DOUBLE);
        /** Time and value. */
        private transient ListState<Tuple2<Long, Double>> waiting;

        private transient ListState<Tuple2<Long, Double>> versions;
        private transient ValueState<Long> timer;
        private final Tuple4<Long, Long, Double, Double> made = new Tuple4<>();

        @Override
        public void open(OpenContext context) {
            waiting = getRuntimeContext().getListState(new ListStateDescriptor<>("waiting", ROW));
            versions = getRuntimeContext().getListState(new ListStateDescriptor<>("versions", ROW));
            timer = getRuntimeContext().getState(new ValueStateDescriptor<>("timer", Types.LONG));
        }

        @Override
        public void processElement1(
                Tuple2<Long, Double> row, Context context, Collector<Tuple4<Long, Long, Double, Double>> out)
                throws Exception {
            waiting.add(Tuple2.of(context.timestamp(), row.f1));
            if (timer.value() == null) {
                timer.update(context.timestamp());
                context.timerService().registerEventTimeTimer(context.timestamp());
            }
        }

        @Override
        public void processElement2(
                Tuple2<Long, Double> row, Context context, Collector<Tuple4<Long, Long, Double, Double>> out)
                throws Exception {
            versions.add(Tuple2.of(context.timestamp(), row.f1));
        }

        @Override
        public void onTimer(
                long timeMs, OnTimerContext context, Collector<Tuple4<Long, Long, Double, Double>> out)
                throws Exception {
            long watermarkMs = context.timerService().currentWatermark();
            TreeMap<Long, Double> known = new TreeMap<>();
            for (Tuple2<Long, Double> version : versions.get()) {
                known.put(version.f0, version.f1);
            }
            List<Tuple2<Long, Double>> later = new ArrayList<>();
            long nextMs = Long.MAX_VALUE;
            for (Tuple2<Long, Double> row : waiting.get()) {
                if (row.f0 > watermarkMs) {
                    later.add(row);
                    nextMs = Math.min(nextMs, row.f0);
                } else {
                    var version = known.floorEntry(row.f0);
                    made.setFields(context.getCurrentKey(), row.f0, row.f1, version == null ? null : version.getValue());
                    out.collect(made);
                }
            }
            if (later.isEmpty()) {
                waiting.clear();
                timer.clear();
            } else {
                waiting.update(later);
                timer.update(nextMs);
                context.timerService().registerEventTimeTimer(nextMs);
            }
            Long newestMs = known.floorKey(watermarkMs);
            if (newestMs != null && newestMs > known.firstKey()) { // older ones are not asked for any more
                List<Tuple2<Long, Double>> kept = new ArrayList<>();
                known.tailMap(newestMs, true).forEach((ms, value) -> kept.add(Tuple2.of(ms, value)));
                versions.update(kept);
            }
        }
    }

    static Report asofJoin(Options options) throws Exception {
        return KeyedJobs.warmAndRun(options, USUAL, (env, n, seconds) -> {
            DataStream<Tuple3<Integer, Long, Double>> events = KeyedJobs.read(
                    env, new Sided(n, env.getParallelism(), VERSIONED_KEYS, 11, true), Sided.TYPE, n, seconds);
            side(events, 0)
                    .connect(side(events, 1))
                    .process(new NewestVersion(), NewestVersion.TYPE)
                    .flatMap(new Totals<Tuple4<Long, Long, Double, Double>>("results", 3, (row, sums) -> {
                        sums[0] += 1;
                        sums[1] += row.f2;
                        sums[2] += row.f3 == null ? 0 : row.f3;
                    }));
        });
    }
}
