package midstream.peers;

/** `Main WORKLOAD --directory DIR [--variant V] [--events N] ...`: one workload, once; its figures are the last line. */
public final class Main {
    private Main() {}

    public static void main(String[] arguments) {
        int status = 1;
        try {
            System.out.println(run(Options.parse(arguments)).json());
            status = 0;
        } catch (Throwable fault) {
            fault.printStackTrace();
        }
        System.out.flush();
        Runtime.getRuntime().halt(status); // the cluster's threads do not end by themselves
    }

    private static Report run(Options options) throws Exception {
        return switch (options.workload()) {
            case "window" -> KeyedJobs.window(options);
            case "window_keys" -> KeyedJobs.windowOfManyKeys(options);
            case "sliding" -> KeyedJobs.sliding(options);
            case "keyed_process" -> KeyedJobs.keyedProcess(options);
            case "strings" -> KeyedJobs.strings(options);
            case "exchange" -> KeyedJobs.exchange(options);
            case "running_aggregate" -> OperatorJobs.runningAggregate(options);
            case "drop_duplicates" -> OperatorJobs.dropDuplicates(options);
            case "interval_join" -> OperatorJobs.intervalJoin(options);
            case "asof_join" -> OperatorJobs.asofJoin(options);
            case "kafka" -> KafkaJob.run(options);
            case "latency_kafka" -> LatencyKafkaJob.run(options);
            case "lakehouse" -> LakehouseJob.run(options);
            case "latency" -> LatencyJob.run(options);
            case "checkpoint" -> SlowSinkJobs.checkpoint(options);
            case "recovery" -> SlowSinkJobs.recovery(options);
            default -> NexmarkJobs.run(options);
        };
    }
}
