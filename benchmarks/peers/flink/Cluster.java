package midstream.peers;

import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.util.ArrayList;
import java.util.List;
import java.util.function.Consumer;
import org.apache.flink.api.common.JobExecutionResult;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.runtime.minicluster.MiniCluster;
import org.apache.flink.runtime.minicluster.MiniClusterConfiguration;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.JsonNode;
import org.apache.flink.shaded.jackson2.com.fasterxml.jackson.databind.ObjectMapper;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Where jobs run, and what Flink's REST interface says of them. `local`: one task manager with P slots in this JVM,
 * exchange in memory. `tcp`: P task managers with one slot each in this JVM, exchange over loopback.
 */
public final class Cluster implements AutoCloseable {

    /** A completed checkpoint as Flink's statistics have it. */
    public record Checkpoint(long id, long triggeredMs, long ackedMs, long stateBytes, long inFlightBytes) {
        long tookMs() {
            return ackedMs - triggeredMs;
        }
    }

    /** `seconds`: from all tasks running to the job's end. */
    public record Outcome(JobExecutionResult result, double seconds, List<Checkpoint> checkpoints, long failed) {
        public double[] sums(String name) {
            return result.getAccumulatorResult(name);
        }
    }

    private final MiniCluster mini;
    private final String host;
    private final int port;
    private final HttpClient http = HttpClient.newHttpClient();
    private final ObjectMapper json = new ObjectMapper();

    /** `settings`: of the task managers. */
    public Cluster(String where, int slots, Configuration settings) throws Exception {
        boolean tcp = where.equals("tcp");
        mini = new MiniCluster(new MiniClusterConfiguration.Builder()
                .setConfiguration(settings)
                .setNumTaskManagers(tcp ? slots : 1)
                .setNumSlotsPerTaskManager(tcp ? 1 : slots)
                .withRandomPorts()
                .build());
        mini.start();
        URI rest = mini.getRestAddress().get();
        host = rest.getHost();
        port = rest.getPort();
    }

    public StreamExecutionEnvironment environment(Configuration settings, int parallelism) {
        StreamExecutionEnvironment env = StreamExecutionEnvironment.createRemoteEnvironment(host, port, settings);
        env.setParallelism(parallelism);
        return env;
    }

    public JobClient start(Configuration settings, int parallelism, Consumer<StreamExecutionEnvironment> build)
            throws Exception {
        StreamExecutionEnvironment env = environment(settings, parallelism);
        build.accept(env);
        return env.executeAsync("benchmark");
    }

    public Outcome run(Configuration settings, int parallelism, Consumer<StreamExecutionEnvironment> build)
            throws Exception {
        return finished(start(settings, parallelism, build));
    }

    /** Waits for it. */
    public Outcome finished(JobClient job) throws Exception {
        JobExecutionResult result = job.getJobExecutionResult().get();
        String id = job.getJobID().toString();
        JsonNode found = get("/jobs/" + id);
        double seconds = (found.at("/timestamps/FINISHED").asLong() - allRunningMs(id)) / 1e3;
        return new Outcome(result, seconds, checkpoints(id), failed(id));
    }

    /** When the last subtask of the present attempt began to run; 0 if some do not run yet. */
    public long allRunningMs(String id) throws Exception {
        long latest = 0;
        for (JsonNode vertex : get("/jobs/" + id).get("vertices")) {
            String path = "/jobs/" + id + "/vertices/" + vertex.get("id").asText() + "/subtasktimes";
            for (JsonNode subtask : get(path).get("subtasks")) {
                long running = subtask.at("/timestamps/RUNNING").asLong();
                if (running <= 0) {
                    return 0;
                }
                latest = Math.max(latest, running);
            }
        }
        return latest;
    }

    public void awaitRunning(JobClient job) throws Exception {
        String id = job.getJobID().toString();
        while (get("/jobs/" + id).get("vertices") == null || allRunningMs(id) == 0) {
            String state = get("/jobs/" + id).at("/state").asText();
            if (state.equals("FAILED") || state.equals("FINISHED") || state.equals("CANCELED")) {
                throw new IllegalStateException("the job ended before it ran: " + state + ": "
                        + get("/jobs/" + id + "/exceptions").toString());
            }
            Thread.sleep(20);
        }
    }

    /** Those that completed, the oldest first. */
    public List<Checkpoint> checkpoints(String id) throws Exception {
        List<Checkpoint> found = new ArrayList<>();
        for (JsonNode one : get("/jobs/" + id + "/checkpoints").get("history")) {
            if (one.get("status").asText().equals("COMPLETED")) {
                found.add(0, new Checkpoint(
                        one.get("id").asLong(),
                        one.get("trigger_timestamp").asLong(),
                        one.get("latest_ack_timestamp").asLong(),
                        one.get("state_size").asLong(),
                        one.get("persisted_data").asLong()));
            }
        }
        return found;
    }

    public long failed(String id) throws Exception {
        return get("/jobs/" + id + "/checkpoints").at("/counts/failed").asLong();
    }

    /** Unless one is under way. */
    public void askForCheckpoint(String id) throws Exception {
        if (get("/jobs/" + id + "/checkpoints").at("/counts/in_progress").asLong() == 0) {
            HttpRequest.Builder ask = HttpRequest.newBuilder(uri("/jobs/" + id + "/checkpoints"))
                    .header("Content-Type", "application/json")
                    .POST(HttpRequest.BodyPublishers.ofString("{\"checkpointType\": \"CONFIGURED\"}"));
            http.send(ask.build(), HttpResponse.BodyHandlers.discarding());
        }
    }

    public String latestCheckpointPath(String id) throws Exception {
        return get("/jobs/" + id + "/checkpoints").at("/latest/completed/external_path").asText();
    }

    public JsonNode get(String path) throws Exception {
        HttpRequest ask = HttpRequest.newBuilder(uri(path)).build();
        return json.readTree(http.send(ask, HttpResponse.BodyHandlers.ofString()).body());
    }

    private URI uri(String path) {
        return URI.create("http://" + host + ":" + port + path);
    }

    @Override
    public void close() {
        mini.closeAsync(); // not awaited: it would wait for results that nobody fetches
    }
}
