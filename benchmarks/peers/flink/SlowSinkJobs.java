package midstream.peers;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.locks.LockSupport;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichFlatMapFunction;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.typeinfo.PrimitiveArrayTypeInfo;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.api.java.tuple.Tuple3;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.util.Collector;

/** Source → rebalance → map → rebalance → a sink that takes its time over every row of 1 KiB. */
final class SlowSinkJobs {
    private static final int ROW_BYTES = 1024;
    private static final int WARM_UP = 100;
    private static final int CHECKPOINTS = 300;
    private static final double MODE_S_MAX = 45;
    private static final int INTERVAL_MIN_MS = 10;
    private static final int POLL_MS = 20;

    private static final int RESCALED = 2;
    private static final int BACKLOG_MIB = 256;
    private static final long DAY_MS = 86_400_000;
    private static final double FILLED = 0.7;
    private static final double FILL_S_MAX = 60;
    private static final long FILL_PAUSE_MS = 4_000;
    private static final double RECOVERY_S_MAX = 300;
    private static final long QUIET_MS = 3_000;
    private static final long MARK_NS = 50_000_000;

    private SlowSinkJobs() {}

    /** Number, the attempt that made it, and bytes. */
    static final class Rows implements IndexSource.Generator<Tuple3<Long, Integer, byte[]>> {
        static final TypeInformation<Tuple3<Long, Integer, byte[]>> TYPE =
                Types.TUPLE(Types.LONG, Types.INT, PrimitiveArrayTypeInfo.BYTE_PRIMITIVE_ARRAY_TYPE_INFO);
        private static final byte[] TEXT = new byte[ROW_BYTES - 16];

        @Override
        public Tuple3<Long, Integer, byte[]> make(int split, long j) {
            return Tuple3.of(j, 0, TEXT);
        }

        @Override
        public long timestampMs(int split, long j) {
            return j;
        }
    }

    /** Chained to the source: rows know the attempt that made them, so that what has been recovered can be told. */
    private static final class Stamp
            extends RichMapFunction<Tuple3<Long, Integer, byte[]>, Tuple3<Long, Integer, byte[]>> {
        private final int first;

        Stamp(int first) {
            this.first = first;
        }

        @Override
        public Tuple3<Long, Integer, byte[]> map(Tuple3<Long, Integer, byte[]> row) {
            row.f1 = first + getRuntimeContext().getTaskInfo().getAttemptNumber();
            return row;
        }
    }

    /** Fails once, when there is a file `fail`, and says when in a file `failed`. */
    private static final class Pass
            extends RichMapFunction<Tuple3<Long, Integer, byte[]>, Tuple3<Long, Integer, byte[]>> {
        private final String directory;
        private long nextNs;

        Pass(String directory) {
            this.directory = directory;
        }

        @Override
        public Tuple3<Long, Integer, byte[]> map(Tuple3<Long, Integer, byte[]> row) throws Exception {
            if (getRuntimeContext().getTaskInfo().getIndexOfThisSubtask() == 0 && System.nanoTime() > nextNs) {
                nextNs = System.nanoTime() + 5_000_000;
                if (Files.deleteIfExists(Path.of(directory, "fail"))) {
                    mark(directory, "failed", System.currentTimeMillis());
                    throw new IllegalStateException("as the benchmark wants it");
                }
            }
            return row;
        }
    }

    /** Leaves files with the times of its attempt's first row, and of the last one that an earlier attempt made. */
    private static final class SlowSink extends RichFlatMapFunction<Tuple3<Long, Integer, byte[]>, Long> {
        private final String directory;
        private final long rowNs;
        private final int first;
        private int attempt;
        private String suffix;
        private boolean begun;
        private long oldMs;
        private long nextNs;

        SlowSink(String directory, long rowNs, int first) {
            this.directory = directory;
            this.rowNs = rowNs;
            this.first = first;
        }

        @Override
        public void open(OpenContext context) {
            attempt = first + getRuntimeContext().getTaskInfo().getAttemptNumber();
            suffix = "-" + attempt + "-" + getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
        }

        @Override
        public void flatMap(Tuple3<Long, Integer, byte[]> row, Collector<Long> out) throws Exception {
            if (!begun) {
                begun = true;
                mark(directory, "first" + suffix, System.currentTimeMillis());
            }
            if (row.f1 < attempt) {
                oldMs = System.currentTimeMillis();
            }
            if (oldMs > 0 && System.nanoTime() > nextNs) {
                nextNs = System.nanoTime() + MARK_NS;
                mark(directory, "old" + suffix, oldMs);
            }
            LockSupport.parkNanos(rowNs); // Thread.sleep would round up to whole milliseconds
        }
    }

    private static void mark(String directory, String name, long ms) throws Exception {
        Path partial = Path.of(directory, name + ".part");
        Files.writeString(partial, Long.toString(ms));
        Files.move(partial, Path.of(directory, name), java.nio.file.StandardCopyOption.ATOMIC_MOVE);
    }

    private static void build(StreamExecutionEnvironment env, String directory, long rowNs, int first) {
        IndexSource<Tuple3<Long, Integer, byte[]>> source =
                new IndexSource<>(new Rows(), Rows.TYPE, env.getParallelism(), Long.MAX_VALUE, 0, 0);
        env.fromSource(source, WatermarkStrategy.noWatermarks(), "source").uid("source")
                .map(new Stamp(first)).returns(Rows.TYPE).uid("stamp")
                .rebalance()
                .map(new Pass(directory)).returns(Rows.TYPE).uid("map")
                .rebalance()
                .flatMap(new SlowSink(directory, rowNs, first)).uid("sink");
    }

    private static Map<String, String> checkpointCluster(String variant) {
        Map<String, String> more = new HashMap<>(Map.of("taskmanager.memory.segment-size", "4kb",
                "taskmanager.memory.min-segment-size", "256b"));
        if (variant.startsWith("aligned_debloat")) {
            more.put("taskmanager.network.memory.buffer-debloat.enabled", "true");
            String target = variant.substring("aligned_debloat".length());
            if (!target.isEmpty()) {
                more.put("taskmanager.network.memory.buffer-debloat.target", target.substring(1) + "ms");
                more.put("taskmanager.network.memory.buffer-debloat.period", "50ms");
            }
        }
        return more;
    }

    /** Variants: aligned, aligned_debloat (target 1 s), aligned_debloat_MS, unaligned, unaligned_1. */
    static Report checkpoint(Options options) throws Exception {
        String variant = options.variant().isEmpty() ? "unaligned" : options.variant();
        int parallelism = options.parallelismOr(4);
        Map<String, String> more = new HashMap<>();
        if (variant.startsWith("unaligned")) {
            more.put("execution.checkpointing.unaligned.enabled", "true");
            more.put("execution.checkpointing.aligned-checkpoint-timeout", variant.equals("unaligned_1") ? "1ms" : "0ms");
        } else if (!variant.startsWith("aligned")) {
            throw new IllegalArgumentException("there is no variant " + variant);
        }
        Configuration settings = Settings.ofJob(options.directory(), INTERVAL_MIN_MS, more);
        long rowNs = 1_000_000;
        double maxSeconds = options.maxSeconds() > 0 ? options.maxSeconds() : MODE_S_MAX;
        int wanted = (int) options.eventsOr(CHECKPOINTS);
        int warmUp = wanted * WARM_UP / CHECKPOINTS;
        try (Cluster cluster =
                new Cluster(options.cluster(), parallelism, Settings.ofCluster(checkpointCluster(variant)))) {
            JobClient job = cluster.start(settings, parallelism, env -> build(env, options.directory(), rowNs, 0));
            String id = job.getJobID().toString();
            cluster.awaitRunning(job);
            long warmBy = System.currentTimeMillis() + (long) (maxSeconds * 1000);
            while (cluster.checkpoints(id).size() < warmUp && System.currentTimeMillis() < warmBy) {
                Thread.sleep(POLL_MS);
            }
            long beganMs = System.currentTimeMillis();
            long failedBefore = cluster.failed(id);
            long endMs = beganMs + (long) (maxSeconds * 1000);
            while (since(cluster.checkpoints(id), beganMs).size() < wanted && System.currentTimeMillis() < endMs) {
                Thread.sleep(POLL_MS);
            }
            List<Cluster.Checkpoint> all = since(cluster.checkpoints(id), beganMs);
            long failed = cluster.failed(id) - failedBefore; // the first ones are asked for before all tasks run
            job.cancel().get();
            if (failed > 0 || all.isEmpty()) {
                throw new IllegalStateException(failed + " checkpoints failed, " + all.size() + " completed");
            }
            List<Cluster.Checkpoint> counted = all.subList(0, Math.min(wanted, all.size()));
            double[] tookMs = Report.tookMs(counted);
            double seconds = (counted.get(counted.size() - 1).ackedMs() - counted.get(0).triggeredMs()) / 1e3;
            return new Report(options, variant, parallelism)
                    .put("events", counted.size())
                    .put("seconds", seconds)
                    .put("bounded", counted.size() < wanted)
                    .put("checkpoints_completed", counted.size())
                    .put("checkpoints_failed", failed)
                    .put("checkpoints_per_s", counted.size() / seconds)
                    .put("p50_ms", Report.percentile(tookMs, 0.5))
                    .put("p99_ms", Report.percentile(tookMs, 0.99))
                    .put("in_flight_mib", counted.get(counted.size() - 1).inFlightBytes() / (double) (1 << 20));
        }
    }

    private static List<Cluster.Checkpoint> since(List<Cluster.Checkpoint> all, long ms) {
        return all.stream().filter(one -> one.triggeredMs() >= ms).toList();
    }

    /**
     * Buffers so large that about the backlog is in flight: the number of buffers is fixed in Flink 2. A result
     * partition has 2 a channel and 8 more, and so has an input.
     */
    private static Map<String, String> recoveryCluster(int parallelism) {
        int buffers = 2 * 2 * parallelism * (2 * parallelism + 8);
        int kib = Integer.highestOneBit(BACKLOG_MIB * 1024 * 5 / 4 / buffers);
        return Map.of(
                "taskmanager.memory.segment-size", kib + "kb",
                "taskmanager.memory.network.min", "512mb",
                "taskmanager.memory.network.max", "512mb");
    }

    /** Variants: `during`, checkpoints during recovery; `off`, without. */
    static Report recovery(Options options) throws Exception {
        String variant = options.variant().isEmpty() ? "during" : options.variant();
        if (!variant.equals("during") && !variant.equals("off")) {
            throw new IllegalArgumentException("there is no variant " + variant);
        }
        int parallelism = options.parallelismOr(4);
        Map<String, String> more = new HashMap<>(Map.of(
                "execution.checkpointing.unaligned.enabled", "true",
                "execution.checkpointing.aligned-checkpoint-timeout", "0ms",
                "execution.checkpointing.tolerable-failed-checkpoints", "1000000",
                "execution.checkpointing.externalized-checkpoint-retention", "RETAIN_ON_CANCELLATION",
                // Both are needed, or during-recovery is silently off.
                "execution.checkpointing.unaligned.recover-output-on-downstream.enabled", "" + variant.equals("during"),
                "execution.checkpointing.during-recovery.enabled", "" + variant.equals("during"),
                "restart-strategy.type", "fixed-delay",
                "restart-strategy.fixed-delay.delay", "1ms",
                "restart-strategy.fixed-delay.attempts", "1"));
        String directory = options.directory();
        long rowNs = 200_000;
        Map<String, String> settings = recoveryCluster(parallelism);
        try (Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(settings))) {
            Configuration first = Settings.ofJob(directory, DAY_MS, more);
            JobClient job = cluster.start(first, parallelism, env -> build(env, directory, rowNs, 0));
            cluster.awaitRunning(job);
            double inFlight = fill(cluster, job);
            Files.createFile(Path.of(directory, "fail"));
            long failedMs = await(directory, "failed");
            Report report = new Report(options, variant, parallelism).put("in_flight_mib", inFlight);
            recovered(report, "", cluster, job, directory, 1, parallelism, failedMs);
            double again = fill(cluster, job);
            String path = cluster.latestCheckpointPath(job.getJobID().toString());
            job.cancel().get();
            awaitCancelled(cluster, job);
            more.put("execution.state-recovery.path", path);
            Configuration second = Settings.ofJob(directory, DAY_MS, more);
            long startedMs = System.currentTimeMillis();
            job = cluster.start(second, RESCALED, env -> build(env, directory, rowNs, 1000));
            report.put("rescaled_parallelism", RESCALED).put("rescaled_in_flight_mib", again);
            recovered(report, "rescaled_", cluster, job, directory, 1000, RESCALED, startedMs);
            job.cancel().get();
            return report;
        }
    }

    /**
     * Until enough is in flight: what the last checkpoint held of it, in MiB. Not too often: a barrier ends the
     * buffer of every channel, full or not.
     */
    private static double fill(Cluster cluster, JobClient job) throws Exception {
        String id = job.getJobID().toString();
        long deadlineMs = System.currentTimeMillis() + (long) (FILL_S_MAX * 1000);
        Thread.sleep(FILL_PAUSE_MS);
        while (true) {
            int before = cluster.checkpoints(id).size();
            while (cluster.checkpoints(id).size() == before && System.currentTimeMillis() < deadlineMs) {
                cluster.askForCheckpoint(id);
                Thread.sleep(POLL_MS);
            }
            List<Cluster.Checkpoint> all = cluster.checkpoints(id);
            double found = all.isEmpty() ? 0 : all.get(all.size() - 1).inFlightBytes() / (double) (1 << 20);
            if (found >= FILLED * BACKLOG_MIB) {
                return found;
            }
            if (System.currentTimeMillis() > deadlineMs) {
                throw new IllegalStateException("only " + found + " MiB are in flight after " + FILL_S_MAX + " s");
            }
            Thread.sleep(FILL_PAUSE_MS);
        }
    }

    /** Asks for checkpoints, as soon as all tasks run, until nothing is left to recover; and when all that happened. */
    private static void recovered(
            Report report,
            String prefix,
            Cluster cluster,
            JobClient job,
            String directory,
            int attempt,
            int sinks,
            long beganMs)
            throws Exception {
        long deadlineMs = System.currentTimeMillis() + (long) (RECOVERY_S_MAX * 1000);
        String id = job.getJobID().toString();
        long runningMs = 0;
        while (true) {
            if (runningMs == 0) {
                long found = cluster.get("/jobs/" + id).get("vertices") == null ? 0 : cluster.allRunningMs(id);
                runningMs = found > beganMs ? found : 0;
            } else {
                cluster.askForCheckpoint(id);
            }
            long drainedMs = latest(directory, "old-" + attempt + "-", sinks);
            List<Cluster.Checkpoint> taken = since(cluster.checkpoints(id), beganMs);
            if (runningMs > 0 && drainedMs > 0 && !taken.isEmpty()
                    && System.currentTimeMillis() > drainedMs + QUIET_MS) {
                Cluster.Checkpoint first = taken.get(0);
                report.put(prefix + "running_s", (runningMs - beganMs) / 1e3)
                        .put(prefix + "first_row_s", (earliest(directory, "first-" + attempt + "-", sinks) - beganMs) / 1e3)
                        .put(prefix + "first_checkpoint_s", (first.ackedMs() - beganMs) / 1e3)
                        .put(prefix + "first_checkpoint_mib", first.stateBytes() / (double) (1 << 20))
                        .put(prefix + "checkpoints_during_drain",
                                taken.stream().filter(one -> one.ackedMs() < drainedMs).count())
                        .put(prefix + "drained_s", (drainedMs - beganMs) / 1e3);
                return;
            }
            if (System.currentTimeMillis() > deadlineMs) {
                throw new IllegalStateException("not recovered after " + RECOVERY_S_MAX + " s: running at " + runningMs
                        + ", last recovered row at " + drainedMs + ", " + taken.size() + " checkpoints");
            }
            Thread.sleep(POLL_MS);
        }
    }

    /** 0 until there are all of them. */
    private static long latest(String directory, String prefix, int count) throws Exception {
        long found = 0;
        for (int i = 0; i < count; i++) {
            Path path = Path.of(directory, prefix + i);
            if (!Files.exists(path)) {
                return 0;
            }
            found = Math.max(found, Long.parseLong(Files.readString(path)));
        }
        return found;
    }

    private static long earliest(String directory, String prefix, int count) throws Exception {
        long found = Long.MAX_VALUE;
        for (int i = 0; i < count; i++) {
            found = Math.min(found, Long.parseLong(Files.readString(Path.of(directory, prefix + i))));
        }
        return found;
    }

    private static long await(String directory, String name) throws Exception {
        long deadlineMs = System.currentTimeMillis() + 60_000;
        while (!Files.exists(Path.of(directory, name))) {
            if (System.currentTimeMillis() > deadlineMs) {
                throw new IllegalStateException("the job was told to fail and did not within 60 s");
            }
            Thread.sleep(POLL_MS);
        }
        return Long.parseLong(Files.readString(Path.of(directory, name)));
    }

    private static void awaitCancelled(Cluster cluster, JobClient job) throws Exception {
        while (!cluster.get("/jobs/" + job.getJobID()).at("/state").asText().equals("CANCELED")) {
            Thread.sleep(POLL_MS);
        }
    }
}
