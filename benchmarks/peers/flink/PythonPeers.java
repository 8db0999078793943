package midstream.peers;

import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichFlatMapFunction;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.types.Row;
import org.apache.flink.util.Collector;

/** What a PyFlink job takes from Java: its source and its sink, so that Python only does what is measured. */
public final class PythonPeers {
    private static final int SUBTASKS_MAX = 64;

    private PythonPeers() {}

    /** The events of `window` with their time as a column too, for user code that wants it in its row. */
    static final class Rows implements IndexSource.Generator<Row> {
        static final TypeInformation<Row> TYPE = Types.ROW_NAMED(
                new String[] {"ts", "key", "value"}, Types.LONG, Types.LONG, Types.DOUBLE);
        private final KeyedJobs.Numbers numbers;

        Rows(long events, int splits) {
            numbers = new KeyedJobs.Numbers(events, splits, 10_000);
        }

        @Override
        public Row make(int split, long j) {
            Tuple2<Long, Double> one = numbers.make(split, j);
            return Row.of(numbers.timestampMs(split, j), one.f0, one.f1);
        }

        @Override
        public long timestampMs(int split, long j) {
            return numbers.timestampMs(split, j);
        }
    }

    public static IndexSource<Tuple2<Long, Double>> numbers(long events, int splits, double maxSeconds) {
        KeyedJobs.Numbers numbers = new KeyedJobs.Numbers(events, splits, 10_000);
        return new IndexSource<>(numbers, KeyedJobs.Numbers.TYPE, splits, events / splits, 0, maxSeconds);
    }

    public static IndexSource<Row> rows(long events, int splits, double maxSeconds) {
        return new IndexSource<>(new Rows(events, splits), Rows.TYPE, splits, events / splits, 0, maxSeconds);
    }

    public static IndexSource<Tuple3<Long, Long, Long>> stamped(long events, int splits, double rowsPerSecond) {
        LatencyJob.Stamped stamped = new LatencyJob.Stamped(events / splits);
        return new IndexSource<>(
                stamped, LatencyJob.Stamped.TYPE, splits, events / splits, rowsPerSecond / splits, 0);
    }

    /** Counts what each subtask reads, under `read`: what must come out if the clock ends the run. */
    public static <T> void count(DataStream<T> rows) {
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

    /** Adds results up under `results`: rows, first field (a count), second field (a sum). */
    public static void addUp(DataStream<Row> results) {
        results.flatMap(new Totals<Row>("results", 3, (row, sums) -> {
            sums[0] += 1;
            sums[1] += ((Number) row.getField(0)).doubleValue();
            sums[2] += ((Number) row.getField(1)).doubleValue();
        }));
    }

    /** Rows of number within the split and µs under way, under `latency`; see LatencyJob. */
    public static void latencies(DataStream<Row> results, long events, int splits) {
        results.flatMap(LatencyJob.histogram(
                events / splits, row -> (Long) ((Row) row).getField(0), row -> (Long) ((Row) row).getField(1)));
    }

    public static double percentileMs(double[] sums, double share) {
        return LatencyJob.percentileMs(sums, share);
    }

    /** How many rows arrived. */
    public static double arrived(double[] sums) {
        return sums[LatencyJob.BUCKETS];
    }

    public static Configuration ofCluster() {
        return Settings.ofCluster(java.util.Map.of());
    }

    public static Configuration ofJob(String directory, java.util.Map<String, String> more) {
        return Settings.ofJob(directory, 1_000, more);
    }
}
