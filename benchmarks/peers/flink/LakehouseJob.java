package midstream.peers;

import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.kafka.source.KafkaSource;
import org.apache.flink.connector.kafka.source.KafkaSourceBuilder;
import org.apache.flink.connector.kafka.source.enumerator.initializer.OffsetsInitializer;
import org.apache.flink.core.execution.JobClient;
import org.apache.flink.formats.json.JsonDeserializationSchema;
import org.apache.flink.streaming.api.datastream.DataStream;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.logical.BigIntType;
import org.apache.flink.table.types.logical.DoubleType;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.RowType;
import org.apache.iceberg.PartitionSpec;
import org.apache.iceberg.Schema;
import org.apache.iceberg.flink.TableLoader;
import org.apache.iceberg.flink.sink.IcebergSink;
import org.apache.iceberg.hadoop.HadoopTables;
import org.apache.iceberg.types.Types;

/**
 * JSON from Kafka into an Iceberg table whose catalog is its directory, exactly once. The brokers, topics and tables are
 * in the environment: run.py makes and fills them, and checks what has come out. The variant `delay` reads until the
 * file `stop` is there, and makes `running` once all tasks run.
 */
final class LakehouseJob {
    private LakehouseJob() {}

    /** A POJO, as a value of the input is. */
    public static final class Event {
        public long ts;
        public long key;
        public double value;
    }

    /** The same when delays are measured. */
    public static final class Stamped {
        public long i;
        public long made_us;
    }

    private static final Schema EVENTS = new Schema(
            Types.NestedField.optional(1, "ts", Types.LongType.get()),
            Types.NestedField.optional(2, "key", Types.LongType.get()),
            Types.NestedField.optional(3, "value", Types.DoubleType.get()));
    private static final Schema STAMPED = new Schema(
            Types.NestedField.optional(1, "i", Types.LongType.get()),
            Types.NestedField.optional(2, "made_us", Types.LongType.get()));

    static Report run(Options options) throws Exception {
        int parallelism = options.parallelismOr(2);
        Map<String, String> of = System.getenv();
        long everyMs = Long.parseLong(of.get("CHECKPOINT_MS"));
        Configuration settings = Settings.ofJob(options.directory(), everyMs, Map.of("pipeline.generic-types", "true"));
        try (Cluster cluster = new Cluster(options.cluster(), parallelism, Settings.ofCluster(Map.of()))) {
            if (options.variant().equals("delay")) {
                Path directory = Path.of(options.directory());
                JobClient job = cluster.start(settings, parallelism, env -> delay(env, of.get("KAFKA_IN"), of.get("TABLE")));
                cluster.awaitRunning(job);
                Files.createFile(directory.resolve("running"));
                while (!Files.exists(directory.resolve("stop"))) {
                    Thread.sleep(20);
                }
                return new Report(options, "delay", parallelism);
            }
            cluster.run(settings, parallelism, env -> append(env, of.get("KAFKA_WARM_IN"), of.get("TABLE_WARM")));
            Cluster.Outcome outcome =
                    cluster.run(settings, parallelism, env -> append(env, of.get("KAFKA_IN"), of.get("TABLE")));
            return new Report(options, "iceberg", parallelism)
                    .rate(options.events(), outcome.seconds())
                    .checkpoints(outcome);
        }
    }

    private static void append(StreamExecutionEnvironment env, String topic, String table) {
        KafkaSource<Event> events = source(topic, Event.class).setBounded(OffsetsInitializer.latest()).build();
        RowType type = RowType.of(
                new LogicalType[] {new BigIntType(), new BigIntType(), new DoubleType()},
                new String[] {"ts", "key", "value"});
        DataStream<RowData> rows = env.fromSource(events, WatermarkStrategy.noWatermarks(), "events")
                .map(row -> (RowData) GenericRowData.of(row.ts, row.key, row.value))
                .returns(InternalTypeInfo.of(type));
        write(rows, EVENTS, table);
    }

    private static void delay(StreamExecutionEnvironment env, String topic, String table) {
        KafkaSource<Stamped> events = source(topic, Stamped.class).build();
        RowType type = RowType.of(
                new LogicalType[] {new BigIntType(), new BigIntType()},
                new String[] {"i", "made_us"});
        DataStream<RowData> rows = env.fromSource(events, WatermarkStrategy.noWatermarks(), "events")
                .map(row -> (RowData) GenericRowData.of(row.i, row.made_us))
                .returns(InternalTypeInfo.of(type));
        write(rows, STAMPED, table);
    }

    private static <T> KafkaSourceBuilder<T> source(String topic, Class<T> type) {
        return KafkaSource.<T>builder()
                .setBootstrapServers(System.getenv("KAFKA_BOOTSTRAP"))
                .setTopics(topic)
                .setStartingOffsets(OffsetsInitializer.earliest())
                .setValueOnlyDeserializer(new JsonDeserializationSchema<>(type));
    }

    private static void write(DataStream<RowData> rows, Schema schema, String table) {
        new HadoopTables(new org.apache.hadoop.conf.Configuration()).create(schema, PartitionSpec.unpartitioned(), table);
        IcebergSink.forRowData(rows).tableLoader(TableLoader.fromHadoopTable(table)).append();
    }
}
