package midstream.peers;

import java.util.HashMap;
import java.util.Map;

/** The command line: WORKLOAD, then --name value pairs. */
record Options(
        String workload,
        String variant,
        long events,
        int parallelism,
        double maxSeconds,
        String cluster,
        String directory) {

    static Options parse(String[] arguments) {
        Map<String, String> given = new HashMap<>();
        for (int i = 1; i + 1 < arguments.length; i += 2) {
            given.put(arguments[i], arguments[i + 1]);
        }
        return new Options(
                arguments[0],
                given.getOrDefault("--variant", ""),
                Long.parseLong(given.getOrDefault("--events", "0")),
                Integer.parseInt(given.getOrDefault("--parallelism", "0")),
                Double.parseDouble(given.getOrDefault("--max-seconds", "0")),
                given.getOrDefault("--cluster", "tcp"),
                given.get("--directory"));
    }

    long eventsOr(long usual) {
        return events > 0 ? events : usual;
    }

    int parallelismOr(int usual) {
        return parallelism > 0 ? parallelism : usual;
    }
}
