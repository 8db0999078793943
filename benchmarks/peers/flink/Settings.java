package midstream.peers;

import java.util.Map;
import org.apache.flink.configuration.Configuration;

/** What every job is given: Flink's best for these workloads, and otherwise its defaults. */
final class Settings {
    private Settings() {}

    /** Of task managers and the REST interface. */
    static Configuration ofCluster(Map<String, String> more) {
        Configuration settings = new Configuration();
        settings.setString("taskmanager.memory.network.min", "256mb");
        settings.setString("taskmanager.memory.network.max", "256mb");
        settings.setString("web.checkpoints.history", "10000");
        settings.setString("rest.cache.checkpoint-statistics.timeout", "1ms");
        settings.setString("rest.cache.execution-graph.timeout", "1ms");
        more.forEach(settings::setString);
        return settings;
    }

    /** `everyMs`: 0 is without checkpoints. */
    static Configuration ofJob(String directory, long everyMs, Map<String, String> more) {
        Configuration settings = new Configuration();
        settings.setString("pipeline.object-reuse", "true");
        settings.setString("pipeline.generic-types", "false");
        settings.setString("state.backend.type", "hashmap");
        settings.setString("restart-strategy.type", "none");
        if (everyMs > 0) {
            settings.setString("execution.checkpointing.interval", everyMs + "ms");
            settings.setString("execution.checkpointing.min-pause", "0ms");
            settings.setString("execution.checkpointing.mode", "EXACTLY_ONCE");
            settings.setString("execution.checkpointing.storage", "filesystem");
            settings.setString("execution.checkpointing.dir", "file://" + directory + "/checkpoints");
        }
        more.forEach(settings::setString);
        return settings;
    }
}
