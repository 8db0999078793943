package midstream.peers;

import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple2;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.types.Row;

/** What a PyFlink job takes from Java: its source and its sink, so that Python only does what is measured. */
public final class PythonPeers {
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

    /** Those of `keyed_process`. */
    public static IndexSource<Tuple2<Long, Double>> hours(long events, int splits, double maxSeconds) {
        KeyedJobs.Numbers numbers = new KeyedJobs.Numbers(events, splits, KeyedJobs.HOUR_KEYS, KeyedJobs.STRETCH);
        return new IndexSource<>(numbers, KeyedJobs.Numbers.TYPE, splits, events / splits, 0, maxSeconds);
    }

    public static IndexSource<Row> rows(long events, int splits, double maxSeconds) {
        return new IndexSource<>(new Rows(events, splits), Rows.TYPE, splits, events / splits, 0, maxSeconds);
    }

    /** See KeyedJobs. */
    public static <T> void count(DataStream<T> rows) {
        KeyedJobs.count(rows);
    }

    /** Adds results up under `results`: rows, first field (a count), second field (a sum). */
    public static void addUp(DataStream<Row> results) {
        results.flatMap(new Totals<Row>("results", 3, (row, sums) -> {
            sums[0] += 1;
            sums[1] += ((Number) row.getField(0)).doubleValue();
            sums[2] += ((Number) row.getField(1)).doubleValue();
        }));
    }

    /** The same of totals: rows, first field. */
    public static void addUpTotals(DataStream<Row> results) {
        results.flatMap(new Totals<Row>("results", 2, (row, sums) -> {
            sums[0] += 1;
            sums[1] += ((Number) row.getField(0)).doubleValue();
        }));
    }

    public static Configuration ofCluster() {
        return Settings.ofCluster(java.util.Map.of());
    }

    public static Configuration ofJob(String directory, java.util.Map<String, String> more) {
        return Settings.ofJob(directory, 1_000, more);
    }
}
