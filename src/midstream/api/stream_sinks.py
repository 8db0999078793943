"""The methods of streams that write rows to a sink."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import pyarrow.fs

from midstream.api.picklability import check_shippable
from midstream.api.program import Handle, located
from midstream.api.stream_core import StreamCore
from midstream.connectors.common.row_operations import check_columns
from midstream.connectors.files.encoders import check_encodable
from midstream.connectors.files.file_sink import FileSink
from midstream.connectors.memory.collect_sink import CollectSink
from midstream.connectors.memory.print_sink import PrintSink
from midstream.engine.core.config import Size
from midstream.engine.core.errors import JobError
from midstream.engine.core.key_groups import key_type_supported
from midstream.engine.graph.job_graph import Partitioning
from midstream.engine.operators.sink_api import Sink
from midstream.engine.operators.sink_operator import SinkOperator

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark.sql.datasource import DataSource

    from midstream.connectors.kafka.client import OptionValue
    from midstream.connectors.kafka.kafka_sink import Guarantee
    from midstream.connectors.kafka.record_parser import KafkaFormat


_KEEPING_KEYS: Final = (Partitioning.FORWARD, Partitioning.GLOBAL)
"""What a program may define for a sink with a key: rows stay where a keyed operator has put them, or are all together."""


class StreamSink(Handle):
    """The end of a stream, returned by the methods that write; its `uid`, `name` and `parallelism` are those of the
    sink.

    For example:

        >>> kept = orders.write_parquet("orders").uid("kept")
        >>> testing.run(env)["kept"][0]
        {'user': 'ann', 'price': 3}
    """


class Writable:
    """The methods of a stream that write its rows; of a keyed stream each subtask of the sink gets all rows of a key, in
    order.

    For example:

        >>> _ = orders.key_by("user").write_parquet("by-user")
    """

    def __init__(self, core: StreamCore) -> None:
        self.core = core  # for midstream's own modules
        self.schema = core.schema
        """The columns, as an Arrow schema."""

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in their order."""
        return self.schema.names

    def __repr__(self) -> str:
        parts = [f"{field.name}: {field.type}" for field in self.schema]
        parts += [f"event_time={self.core.event_time_name!r}"] if self.core.event_time is not None else []
        parts += [f"keys={list(self.core.keys)!r}"] if self.core.keys else []
        return f"{type(self).__name__}({', '.join(parts)})"

    @located
    def sink(self, sink: Sink) -> StreamSink:
        """Write the rows to a sink.

        `sink`: one of `midstream.connectors`, or an instance of your own subclass of Sink.

        Returns a StreamSink, on which the sink is named. Raises JobError for anything that is not a sink, and for a
        sink that cannot be sent to the slots.

            >>> kept = CollectSink()
            >>> _ = orders.sink(kept).uid("kept")
            >>> len(testing.run(env)["kept"])
            3
        """
        if not isinstance(sink, Sink):
            raise JobError(f"sink: {sink!r} is not a Sink; make one first, for example PrintSink()")
        return self._end(_kind_of(sink), sink)

    @located
    def write_parquet(
        self,
        directory: str | os.PathLike[str],
        *,
        roll_size: Size = "128 MiB",
        append: bool = False,
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> StreamSink:
        """Write every row exactly once into Parquet files.

        Files appear, whole, with the checkpoint that covers their rows. They are prepared in a hidden directory next to
        `directory`.

        `directory`: a local path or a storage URL. A new job refuses one that is not empty.
        `roll_size`: a file is closed when it has about this size, and at every checkpoint: a number of bytes, or a text
        such as "128 MiB".
        `append`: add files to a directory that is not empty.
        `filesystem`: a pyarrow filesystem, with `directory` as a path in it; by default that of the URL.

        Returns a StreamSink. Raises ConfigError for an invalid directory or size, and SchemaError for a column that the
        files cannot hold; a directory that is in use is refused when the job starts.

            >>> _ = orders.write_parquet("orders").uid("orders-in-files")
        """
        sink = FileSink(directory, format="parquet", roll_size=roll_size, append=append, filesystem=filesystem)
        check_encodable(self.schema, "parquet", "write_parquet")
        return self._end("parquet", sink)

    @located
    def write_jsonl(
        self,
        directory: str | os.PathLike[str],
        *,
        roll_size: Size = "128 MiB",
        append: bool = False,
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> StreamSink:
        """Write every row exactly once into files of JSON lines, with an object per row.

        Times and decimals are written as strings. A value without a form in JSON, such as NaN or infinity, fails the
        job. Files appear as those of `write_parquet` do.

        `directory`: a local path or a storage URL. A new job refuses one that is not empty.
        `roll_size`: a file is closed when it has about this size, and at every checkpoint.
        `append`: add files to a directory that is not empty.
        `filesystem`: a pyarrow filesystem, with `directory` as a path in it; by default that of the URL.

        Returns a StreamSink. Raises as `write_parquet` does.

            >>> _ = orders.write_jsonl("orders").uid("orders-in-files")
        """
        sink = FileSink(directory, format="jsonl", roll_size=roll_size, append=append, filesystem=filesystem)
        check_encodable(self.schema, "jsonl", "write_jsonl")
        return self._end("jsonl", sink)

    @located
    def write_datasource(
        self, data_source: type[DataSource] | DataSource, *, options: Mapping[str, str] | None = None
    ) -> StreamSink:
        """Write through the stream writer of a PySpark Python Data Source, or its batch writer, with checkpoints.

        A writer's `commit` gets the checkpoint's id, and must be idempotent per id, since it is repeated after a
        restore. A batch writer's has no id: what it commits just before a crash may be committed twice.

        `data_source`: its class, or an instance.
        `options`: the options for a class, as strings.

        Returns a StreamSink. Raises ConfigError for a Data Source that cannot be written to.

            orders.write_datasource(MyWarehouse, options={"table": "orders"}).uid("warehouse")
        """
        from midstream.spark.datasource_sink import DataSourceSink

        return self._end("datasource", DataSourceSink(data_source, options=options))

    @located
    def write_postgres(
        self,
        dsn: str,
        table: str,
        *,
        schema: str | None = None,
        key: Sequence[str] = (),
        op: str | None = None,
        append: bool = False,
        evolve: bool = False,
        staging_schema: str | None = None,
    ) -> StreamSink:
        """Write every row exactly once into a table of PostgreSQL (12 or later).

        Rows appear when the checkpoint that covers them completes. Needs `pip install 'midstream[postgres]'`.

        `dsn`: a connection string of libpq, `"host=db dbname=shop user=etl"` or `"postgresql://etl@db/shop"`. Give the
        password as PGPASSWORD, in a password file (~/.pgpass) or a service file, on the driver and wherever slots run;
        one in `dsn` is sent to the slots with the job, and is neither stored nor shown.
        `table`: the name of the table as it is, not SQL. A missing table is created. A new job refuses one that has
        rows, unless `append` or with a `key`.
        `schema`: the schema of the table; without it the server's search_path decides.
        `key`: columns by which rows are upserted, those of a primary key or unique constraint; rows are partitioned by
        them, unless the stream is keyed by them, or `forward` or `global_` defines where rows go. Without it, rows are
        inserted.
        `op`: the text column with each row's operation, which is not written: "insert" and "update" upsert the row,
        "delete" deletes the one with its key. Without it, all rows are upserted.
        `append`: add to a table that has rows.
        `evolve`: add columns that the table lacks, for which the user of `dsn` must own it. Types are never altered.
        `staging_schema`: the schema in which rows wait for their checkpoint, by default that of the table; the user of
        `dsn` needs the right to create tables there.

        Returns a StreamSink. Raises ConfigError for invalid arguments; the table and the rights are checked when the
        job starts.

            orders.write_postgres("host=db dbname=shop user=etl", "orders").uid("orders-table")
        """
        from midstream.connectors.postgres.postgres_sink import PostgresSink

        sink = PostgresSink(
            dsn, table, schema=schema, key=key, op=op, append=append, evolve=evolve, staging_schema=staging_schema
        )
        return self._end_by_key("postgres", sink, sink.key, op)

    @located
    def write_delta(
        self,
        table: str | os.PathLike[str],
        *,
        key: Sequence[str] = (),
        op: str | None = None,
        partition_by: Sequence[str] = (),
        append: bool = False,
        evolve: bool = False,
        auto_compact: bool = False,
        roll_size: Size = "128 MiB",
        storage_options: Mapping[str, str] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> StreamSink:
        """Write every row exactly once into a Delta table, one version per checkpoint.

        Needs `pip install 'midstream[delta]'` for the Python of the driver.

        `table`: a local path, or a URL that pyarrow and deltalake know (s3://…). A missing table is created. A new job
        refuses one that has rows, unless `append` or with a `key`.
        `key`: columns by which rows are upserted, as by `write_postgres`; not floats. Without it, rows are added.
        `op`: the text column with each row's operation, "insert", "update" or "delete", as for `write_postgres`.
        `partition_by`: the partition columns of a table that is created; an existing one keeps its own.
        `append`: add to a table that has rows.
        `evolve`: add columns, and fields of structs, that the table lacks. Other types than the table's are refused.
        `auto_compact`: the driver writes small files again as files of up to `roll_size`, after commits, as versions that
        change no data.
        `roll_size`: a file is closed when it has about this size, and at every checkpoint.
        `storage_options`: what deltalake needs to write the table's log, such as credentials, as strings; only deltalake,
        on the driver, receives them.
        `filesystem`: the pyarrow filesystem with which files are written, by default that of the URL.

        Returns a StreamSink. Raises ConfigError for invalid arguments; the table is checked when the job starts.

            orders.write_delta("s3://lake/orders", partition_by=["user"]).uid("orders-table")
        """
        from midstream.connectors.delta.delta_sink import DeltaSink

        sink = DeltaSink(
            table,
            key=key,
            op=op,
            partition_by=partition_by,
            append=append,
            evolve=evolve,
            auto_compact=auto_compact,
            roll_size=roll_size,
            storage_options=storage_options,
            filesystem=filesystem,
        )
        return self._end_by_key("delta", sink, sink.key, op)

    @located
    def write_iceberg(
        self,
        table: str,
        *,
        catalog: str | Mapping[str, str] | Catalog,
        key: Sequence[str] = (),
        op: str | None = None,
        partition_by: Sequence[str] = (),
        append: bool = False,
        evolve: bool = False,
        auto_compact: bool = False,
        roll_size: Size = "128 MiB",
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> StreamSink:
        """Write every row exactly once into an Iceberg table, one snapshot per checkpoint.

        Needs `pip install 'midstream[iceberg]'` for the Python of the driver and of the slots.

        `table`: its identifier in the catalog, such as "lake.orders". A missing table is created, with its namespace. A
        new job refuses one that has rows, unless `append` or with a `key`.
        `catalog`: the name of a catalog that pyiceberg is configured with, its properties (`{"type": "rest", "uri": …}`),
        or a pyiceberg Catalog. Only the driver uses it.
        `key`: columns by which rows are upserted, as by `write_postgres`; not floats. Without it, rows are added.
        `op`: the text column with each row's operation, "insert", "update" or "delete", as for `write_postgres`.
        `partition_by`: the partitioning of a table that is created: columns, `year(c)`, `month(c)`, `day(c)`, `hour(c)`,
        `bucket(16, c)`, `truncate(4, c)`; an existing one keeps its own.
        `append`: add to a table that has rows.
        `evolve`: add columns, and fields of structs, that the table lacks, and widen int to long, float to double, and
        decimals of the same scale. Other types than the table's are refused.
        `auto_compact`: the driver writes small files again as files of up to `roll_size`, after commits, as snapshots that
        change no data.
        `roll_size`: a file is closed when it has about this size, and at every checkpoint.
        `filesystem`: the pyarrow filesystem with which files are written, by default that of the table's location, with
        the credentials that the catalog gives.

        Returns a StreamSink. Raises ConfigError for invalid arguments; the table is checked when the job starts.

            orders.write_iceberg("lake.orders", catalog="prod", partition_by=["day(at)"]).uid("orders-table")
        """
        from midstream.connectors.iceberg.iceberg_sink import IcebergSink

        sink = IcebergSink(
            table,
            catalog=catalog,
            key=key,
            op=op,
            partition_by=partition_by,
            append=append,
            evolve=evolve,
            auto_compact=auto_compact,
            roll_size=roll_size,
            filesystem=filesystem,
        )
        return self._end_by_key("iceberg", sink, sink.key, op)

    @located
    def write_kafka(
        self,
        servers: str | Sequence[str],
        topic: str,
        *,
        guarantee: Guarantee = "exactly_once",
        format: KafkaFormat = "json",
        key: str | None = None,
        headers: str | None = None,
        partition: str | None = None,
        registry: Mapping[str, OptionValue] | None = None,
        message: object = None,
        options: Mapping[str, OptionValue] | None = None,
    ) -> StreamSink:
        """Write every row to a topic of Kafka (2.5 or later), exactly once or at least once.

        Needs `pip install 'midstream[kafka]'`.

        `servers`: one or more `host:port`, as a list or separated by commas.
        `topic`: the name of the topic.
        `guarantee`: "exactly_once": rows appear with the checkpoint that covers them, and readers with
        `isolation.level=read_committed` see each once, whatever fails; needs a checkpoint directory. "at_least_once":
        rows appear immediately, and after a failure those since the last checkpoint appear again.
        `format`: "json" (an object per row), "avro" (a record of the columns, whose schema is registered in `registry`
        as the subject `<topic>-value`), "protobuf" (the message class `message`, whose fields have the columns' names;
        registered in the same way where there is a `registry`), "bytes" or "text" (the one column that is left beside
        the others named here; null is a record without a value).
        `key`: the column of the record's key, text or binary; it stays in a JSON object or an Avro record if it is text,
        and in a message that has a field of its name.
        `headers`: the column of the record's headers, lists of structs of `name` and `value`.
        `partition`: the column of the partition's number, int32 or int64; without one, or where it is null, the key
        determines the partition, as in Kafka's clients.
        `registry`: options of a schema registry, such as `{"url": "http://registry:8081"}`.
        `message`: the generated message class, for "protobuf".
        `options`: librdkafka's, such as those of SASL and TLS; a value `env:NAME` or `file:/path` is replaced where the
        job connects.

        Returns a StreamSink. Raises ConfigError for invalid arguments, SchemaError for columns without a form in the
        format; the cluster is queried when the job starts.

            orders.write_kafka("kafka-1:9092", "orders", key="user").uid("orders-topic")
        """
        from midstream.connectors.kafka.kafka_sink import KafkaSink

        sink = KafkaSink(
            servers,
            topic,
            guarantee=guarantee,
            format=format,
            key=key,
            headers=headers,
            partition=partition,
            registry=registry,
            message=message,
            options=options,
        )
        return self._end("kafka", sink)

    @located
    def print(self, prefix: str = "", limit: int | None = None) -> StreamSink:
        """Print rows to the standard output of the slots, at least once: after a failure some are printed again.

        `prefix`: put before every line.
        `limit`: the number of rows that each subtask prints; None for all.

        Returns a StreamSink. Raises ConfigError for a limit that is not a whole number.

            >>> _ = orders.print("order: ", limit=10)
        """
        return self._end("print", PrintSink(prefix, limit))

    @located
    def collect(self) -> CollectSink:
        """Collect the rows of completed checkpoints in this process, exactly once; for notebooks, tests and small
        results.

        Returns a CollectSink, whose rows are read with `rows()`, `table()` or `frame()` while the job runs and after
        it.

            >>> kept = orders.collect()
            >>> testing.run(env)[kept][0]
            {'user': 'ann', 'price': 3}
        """
        sink = CollectSink()
        self._end("collect", sink)
        return sink

    def _end_by_key(self, kind: str, sink: Sink, key: tuple[str, ...], op: str | None) -> StreamSink:
        """End the stream so that one subtask gets all rows of a key, in order.

        Columns of the key that a stream cannot be keyed by, such as decimals, are left to the others.
        """
        from midstream.api.data_stream import checked_keys

        method, core = f"write_{kind}", self.core
        check_columns(self.schema, key, op, method)
        if key and set(core.keys) != set(key) and core.partitioning not in _KEEPING_KEYS:
            hashed = tuple(name for name in key if key_type_supported(self.schema.field(name).type))
            core = replace(core, keys=checked_keys(self, hashed or key, method))
        return self._end(kind, sink, core)

    def _end(self, kind: str, sink: Sink, core: StreamCore | None = None) -> StreamSink:
        check_shippable(sink, kind)
        program, inputs = self.core.program, (core or self.core).inputs()
        node = program.add(kind, inputs, lambda name: SinkOperator(name, sink, self.schema), sink=sink)
        return StreamSink(program, node.id)


def _kind_of(sink: Sink) -> str:
    """Derive the operator kind from the class: PrintSink is "print", CollectSink "collect"."""
    return type(sink).__name__.removesuffix("Sink").lower() or "sink"
