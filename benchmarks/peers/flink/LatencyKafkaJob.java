package midstream.peers;

import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Base64;
import java.util.HashMap;
import java.util.Map;
import java.util.Properties;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.common.serialization.SimpleStringSchema;
import org.apache.flink.api.common.state.ValueState;
import org.apache.flink.api.common.state.ValueStateDescriptor;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Text from Kafka, one of three queries, text to Kafka. The variant is the query; brokers, topics, guarantee and
 * checkpoint interval are in the environment. It reads until the file `stop` is there, and makes `running` once all
 * tasks run; run.py measures.
 */
final class LatencyKafkaJob {
    private static final int STAMP = 28;
    private static final int USER = 8;
    private static final int USERS = 10_000;

    private LatencyKafkaJob() {}

    private static final class Counting extends RichMapFunction<String, String> {
        private transient ValueState<Long> count;

        @Override
        public void open(OpenContext context) {
            count = getRuntimeContext().getState(new ValueStateDescriptor<>("n", Types.LONG));
        }

        @Override
        public String map(String row) throws Exception {
            Long before = count.value();
            long n = before == null ? 1 : before + 1;
            count.update(n);
            return row.substring(0, STAMP + USER) + ' ' + n;
        }
    }

    private static final class Joining extends RichMapFunction<String, String> {
        private transient Map<String, Integer> twice;

        @Override
        public void open(OpenContext context) {
            twice = new HashMap<>();
            for (int user = 0; user < USERS; user++) {
                twice.put(String.format("%08d", user), 2 * user);
            }
        }

        @Override
        public String map(String row) {
            return row.substring(0, STAMP + USER) + ' ' + twice.get(row.substring(STAMP, STAMP + USER));
        }
    }

    static Report run(Options options) throws Exception {
        int parallelism = options.parallelismOr(2);
        Map<String, String> of = System.getenv();
        long everyMs = Long.parseLong(of.get("CHECKPOINT_MS"));
        Configuration settings = Settings.ofJob(
                options.directory(), everyMs, Map.of("execution.buffer-timeout.interval", "1 ms"));
        try (Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(Map.of()))) {
            JobClient job = cluster.start(settings, parallelism, env -> build(env, options.variant(), of));
            cluster.awaitRunning(job);
            Path directory = Path.of(options.directory());
            Files.createFile(directory.resolve("running"));
            while (!Files.exists(directory.resolve("stop"))) {
                Thread.sleep(20);
            }
            return new Report(options, options.variant(), parallelism);
        }
    }

    private static void build(StreamExecutionEnvironment env, String query, Map<String, String> of) {
        KafkaSource<String> source = KafkaSource.<String>builder()
                .setBootstrapServers(of.get("KAFKA_BOOTSTRAP"))
                .setTopics(of.get("KAFKA_IN"))
                .setStartingOffsets(OffsetsInitializer.earliest())
                .setValueOnlyDeserializer(new SimpleStringSchema())
                .build();
        DataStream<String> rows = env.fromSource(source, WatermarkStrategy.noWatermarks(), "rows");
        DataStream<String> made =
                switch (query) {
                    case "stateless" -> rows.map(
                            row -> Base64.getEncoder().encodeToString(row.getBytes(StandardCharsets.UTF_8)));
                    case "count" -> rows.keyBy(row -> row.substring(STAMP, STAMP + USER)).map(new Counting());
                    case "join" -> rows.map(new Joining());
                    default -> throw new IllegalArgumentException("there is no query " + query);
                };
        boolean isExact = of.get("GUARANTEE").equals("exactly_once");
        Properties producer = new Properties();
        producer.setProperty("linger.ms", "0");
        producer.setProperty("transaction.timeout.ms", "900000"); // the broker's limit
        made.sinkTo(KafkaSink.<String>builder()
                .setBootstrapServers(of.get("KAFKA_BOOTSTRAP"))
                .setKafkaProducerConfig(producer)
                .setDeliveryGuarantee(isExact ? DeliveryGuarantee.EXACTLY_ONCE : DeliveryGuarantee.AT_LEAST_ONCE)
                .setTransactionalIdPrefix(of.get("KAFKA_OUT"))
                .setRecordSerializer(KafkaRecordSerializationSchema.<String>builder()
                        .setTopic(of.get("KAFKA_OUT"))
                        .setValueSerializationSchema(new SimpleStringSchema())
                        .build())
                .build());
    }
}
