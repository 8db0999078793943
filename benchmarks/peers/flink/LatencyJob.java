package midstream.peers;

import java.time.Instant;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/** From a row's creation, through a keyed exchange, to its sink, at 20,000 rows/s. */
final class LatencyJob {
    private static final int RATE_PER_S = 20_000;
    private static final int USUAL_S = 20;
    private static final double WARM_UP_SHARE = 0.1;
    private static final int BUCKETS = 1024;
    private static final double GROWTH = 1.02;

    private LatencyJob() {}

    /** Number within its split, key, and when it was made, in µs by the wall clock. */
    private static final class Stamped implements IndexSource.Generator<Tuple3<Long, Long, Long>> {
        static final TypeInformation<Tuple3<Long, Long, Long>> TYPE = Types.TUPLE(Types.LONG, Types.LONG, Types.LONG);
        private final long rows;

        Stamped(long rows) {
            this.rows = rows;
        }

        @Override
        public Tuple3<Long, Long, Long> make(int split, long j) {
            return Tuple3.of(j, (split * rows + j) % 1000, nowUs());
        }

        @Override
        public long timestampMs(int split, long j) {
            return j;
        }
    }

    private static long nowUs() {
        Instant now = Instant.now();
        return now.getEpochSecond() * 1_000_000 + now.getNano() / 1000;
    }

    /** Variants: `default`, Flink's buffer timeout of 100 ms; a number is another one, in ms. */
    static Report run(Options options) throws Exception {
        String variant = options.variant().isEmpty() ? "default" : options.variant();
        int parallelism = options.parallelismOr(2);
        long events = options.eventsOr((long) RATE_PER_S * USUAL_S);
        Map<String, String> more =
                variant.equals("default") ? Map.of() : Map.of("execution.buffer-timeout.interval", variant + "ms");
        Configuration settings = Settings.ofJob(options.directory(), 1_000, more);
        try (Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(Map.of()))) {
            cluster.run(settings, parallelism, env -> build(env, RATE_PER_S * 2));
            Cluster.Outcome outcome = cluster.run(settings, parallelism, env -> build(env, events));
            double[] found = outcome.sums("latency");
            return new Report(options, variant, parallelism)
                    .rate(events, outcome.seconds())
                    .put("result", new double[] {found[BUCKETS]})
                    .put("rate_per_s", RATE_PER_S)
                    .put("p50_ms", percentileMs(found, 0.5))
                    .put("p90_ms", percentileMs(found, 0.9))
                    .put("p99_ms", percentileMs(found, 0.99))
                    .put("p999_ms", percentileMs(found, 0.999))
                    .checkpoints(outcome);
        }
    }

    /** Sums: how many rows in each bucket of 2 %, then of all rows, then of those that count. */
    private static void build(StreamExecutionEnvironment env, long events) {
        int splits = env.getParallelism();
        long rows = events / splits;
        long warm = (long) (rows * WARM_UP_SHARE);
        IndexSource<Tuple3<Long, Long, Long>> source =
                new IndexSource<>(new Stamped(rows), Stamped.TYPE, splits, rows, (double) RATE_PER_S / splits, 0);
        env.fromSource(source, WatermarkStrategy.noWatermarks(), "events")
                .keyBy(row -> row.f1, Types.LONG)
                .flatMap(new Totals<Tuple3<Long, Long, Long>>("latency", BUCKETS + 2, (row, sums) -> {
                    sums[BUCKETS] += 1;
                    if (row.f0 >= warm) {
                        sums[BUCKETS + 1] += 1;
                        double us = Math.max(1, nowUs() - row.f2);
                        sums[Math.min(BUCKETS - 1, (int) (Math.log(us) / Math.log(GROWTH)))] += 1;
                    }
                }));
    }

    /** The upper bound of the bucket in which that share is reached. */
    private static double percentileMs(double[] sums, double share) {
        double below = 0;
        for (int bucket = 0; bucket < BUCKETS; bucket++) {
            below += sums[bucket];
            if (below >= share * sums[BUCKETS + 1]) {
                return Math.pow(GROWTH, bucket + 1) / 1000;
            }
        }
        return Double.POSITIVE_INFINITY;
    }
}
