package midstream.peers;

import java.util.Arrays;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.flink.runtime.util.EnvironmentInformation;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;

/** What a run found, in the order in which it was put in; run.py checks `result` before it prints the rest. */
final class Report {
    private final Map<String, Object> figures = new LinkedHashMap<>();

    Report(Options options, String variant, int parallelism) {
        figures.put("engine", "flink-java");
        figures.put("version", EnvironmentInformation.getVersion());
        figures.put("workload", options.workload());
        figures.put("variant", variant);
        figures.put("cluster", options.cluster());
        figures.put("parallelism", parallelism);
    }

    Report put(String name, Object value) {
        figures.put(name, value instanceof Double d ? Math.round(d * 1000) / 1000.0 : value);
        return this;
    }

    Report rate(long events, double seconds) {
        return put("events", events).put("seconds", seconds).put("events_per_s", Math.round(events / seconds));
    }

    /** Nothing if nothing was ever collected. */
    Report heap(HeapAfterGc heap) {
        return heap.peakMb() > 0 ? put("heap_after_gc_mb", heap.peakMb()) : this;
    }

    Report checkpoints(Cluster.Outcome outcome) {
        put("checkpoints_completed", outcome.checkpoints().size());
        put("checkpoints_failed", outcome.failed());
        if (!outcome.checkpoints().isEmpty()) {
            put("checkpoint_p50_ms", percentile(tookMs(outcome.checkpoints()), 0.5));
        }
        return this;
    }

    String json() throws Exception {
        return new ObjectMapper().writeValueAsString(figures);
    }

    static double[] tookMs(List<Cluster.Checkpoint> checkpoints) {
        return checkpoints.stream().mapToDouble(Cluster.Checkpoint::tookMs).toArray();
    }

    /** Between neighbours, as numpy does it. */
    static double percentile(double[] values, double share) {
        double[] sorted = values.clone();
        Arrays.sort(sorted);
        double at = share * (sorted.length - 1);
        int below = (int) at;
        int above = Math.min(below + 1, sorted.length - 1);
        return sorted[below] + (at - below) * (sorted[above] - sorted[below]);
    }
}
