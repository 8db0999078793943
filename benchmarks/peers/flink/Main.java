package midstream.peers;

import java.util.Map;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;

/** `Main WORKLOAD --directory DIR [--variant V] [--events N] ...`: one workload, once; its figures are the last line. */
public final class Main {
    private Main() {}

    public static void main(String[] arguments) {
        int status = 1;
        try {
            Options options = Options.parse(arguments);
            System.out.println(
                    options.workload().equals("settings") ? settings(options) : run(options).json());
            status = 0;
        } catch (Throwable fault) {
            fault.printStackTrace();
        }
        System.out.flush();
        Runtime.getRuntime().halt(status); // the cluster's threads do not end by themselves
    }

    /** `settings --variant V --of WORKLOAD --parallelism P`: what task managers that are processes must be given. */
    private static String settings(Options options) throws Exception {
        Map<String, String> more = switch (options.of()) {
            case "checkpoint" -> SlowSinkJobs.checkpointCluster(options.variant());
            case "recovery" -> SlowSinkJobs.recoveryCluster(options.parallelism(), true);
            default -> Map.of();
        };
        return new ObjectMapper().writeValueAsString(Settings.ofCluster(more).toMap());
    }

    private static Report run(Options options) throws Exception {
        return switch (options.workload()) {
            case "window" -> KeyedJobs.window(options);
            case "sliding" -> KeyedJobs.sliding(options);
            case "strings" -> KeyedJobs.strings(options);
            case "exchange" -> KeyedJobs.exchange(options);
            case "latency" -> LatencyJob.run(options);
            case "checkpoint" -> SlowSinkJobs.checkpoint(options);
            case "recovery" -> SlowSinkJobs.recovery(options);
            default -> NexmarkJobs.run(options);
        };
    }
}
