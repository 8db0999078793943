package midstream.peers;

import java.util.Map;
import java.util.Properties;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.functions.AggregateFunction;
import org.apache.flink.api.common.typeinfo.Types;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.base.DeliveryGuarantee;
import org.apache.flink.connector.kafka.sink.KafkaRecordSerializationSchema;
import org.apache.flink.connector.kafka.sink.KafkaSink;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.formats.json.JsonDeserializationSchema;
import org.apache.flink.formats.json.JsonSerializationSchema;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.streaming.api.functions.windowing.ProcessWindowFunction;
import org.apache.flink.streaming.api.windowing.assigners.TumblingEventTimeWindows;
import org.apache.flink.streaming.api.windowing.windows.TimeWindow;
import org.apache.flink.util.Collector;

/**
 * JSON from Kafka, count and sum per key and 10 s, JSON to Kafka exactly once. The brokers and topics are in the
 * environment: run.py makes and fills them, and checks what has come out.
 */
final class KafkaJob {
    private static final long CHECKPOINT_MS = 1_000;

    private KafkaJob() {}

    /** A POJO, as a value of the input is. */
    public static final class Event {
        public long ts;
        public long key;
        public double value;
    }

    /** A POJO, as a value of the output is. */
    public static final class Result {
        public long key;
        public long window_start;
        public long n;
        public double total;
    }

    private static final class Counting implements AggregateFunction<Event, Result, Result> {
        @Override
        public Result createAccumulator() {
            return new Result();
        }

        @Override
        public Result add(Event row, Result found) {
            found.n++;
            found.total += row.value;
            return found;
        }

        @Override
        public Result getResult(Result found) {
            return found;
        }

        @Override
        public Result merge(Result one, Result other) {
            throw new UnsupportedOperationException("these windows do not merge");
        }
    }

    private static final class Named extends ProcessWindowFunction<Result, Result, Long, TimeWindow> {
        @Override
        public void process(Long key, Context context, Iterable<Result> found, Collector<Result> out) {
            Result row = found.iterator().next();
            row.key = key;
            row.window_start = context.window().getStart();
            out.collect(row);
        }
    }

    static Report run(Options options) throws Exception {
        int parallelism = options.parallelismOr(2);
        Map<String, String> of = System.getenv();
        Configuration settings = Settings.ofJob(options.directory(), CHECKPOINT_MS, Map.of());
        try (Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(Map.of()))) {
            cluster.run(settings, parallelism, env -> build(env, of.get("KAFKA_WARM_IN"), of.get("KAFKA_WARM_OUT")));
            Cluster.Outcome outcome =
                    cluster.run(settings, parallelism, env -> build(env, of.get("KAFKA_IN"), of.get("KAFKA_OUT")));
            return new Report(options, "default", parallelism)
                    .rate(options.events(), outcome.seconds())
                    .checkpoints(outcome);
        }
    }

    private static void build(StreamExecutionEnvironment env, String source, String sink) {
        String servers = System.getenv("KAFKA_BOOTSTRAP");
        KafkaSource<Event> events = KafkaSource.<Event>builder()
                .setBootstrapServers(servers)
                .setTopics(source)
                .setStartingOffsets(OffsetsInitializer.earliest())
                .setBounded(OffsetsInitializer.latest())
                .setProperty("isolation.level", "read_committed")
                .setValueOnlyDeserializer(new JsonDeserializationSchema<>(Event.class))
                .build();
        Properties producer = new Properties();
        producer.setProperty("transaction.timeout.ms", "900000"); // the broker's limit
        KafkaSink<Result> results = KafkaSink.<Result>builder()
                .setBootstrapServers(servers)
                .setKafkaProducerConfig(producer)
                .setDeliveryGuarantee(DeliveryGuarantee.EXACTLY_ONCE)
                .setTransactionalIdPrefix(sink)
                .setRecordSerializer(KafkaRecordSerializationSchema.<Result>builder()
                        .setTopic(sink)
                        .setValueSerializationSchema(new JsonSerializationSchema<Result>())
                        .build())
                .build();
        env.fromSource(
                        events,
                        WatermarkStrategy.<Event>forMonotonousTimestamps().withTimestampAssigner((row, before) -> row.ts),
                        "events")
                .keyBy(row -> row.key, Types.LONG)
                .window(TumblingEventTimeWindows.of(java.time.Duration.ofSeconds(10)))
                .aggregate(new Counting(), new Named())
                .sinkTo(results);
    }
}
