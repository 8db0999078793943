"""Environment: where a program begins, and the methods that start it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import polars as pl
import pyarrow as pa
import pyarrow.fs

from midstream.api.argument_checks import calling_file, calling_line, calling_module, require_callable
from midstream.api.data_stream import DataStream, main_output
from midstream.api.hints import OF_ENVIRONMENTS, Hinted
from midstream.api.picklability import check_shippable
from midstream.api.program import Program, located
from midstream.api.stream_core import Origin, StreamCore
from midstream.api.tuning import Tuning
from midstream.api.user_modules import check_extra, job_file, note_modules
from midstream.connectors.common.malformed_records import BadRecordsMax, OnBadRecord
from midstream.connectors.files.file_source import CsvOptions, FileSource, Format
from midstream.connectors.memory.collection_source import CollectionSource, from_rows
from midstream.connectors.memory.generator_source import Generate, GeneratorSource
from midstream.engine.core.batches import to_arrow
from midstream.engine.core.config import (
    DEFAULT_RESTART,
    AutoscaleBounds,
    Duration,
    JobConfig,
    RestartStrategy,
    Size,
    check_parallelism,
    duration_s,
    interval_s,
    size_bytes,
)
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.core.schemas import SchemaLike, as_declared, as_schema
from midstream.engine.graph.describe import describe_text
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.engine.operators.bad_records import BAD_RECORDS, BAD_RECORDS_SCHEMA
from midstream.engine.operators.source_api import Source
from midstream.engine.protocol.job_status import JobStatus
from midstream.runtime.storage.file_storage import absolute

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyspark.sql import DataFrame
    from pyspark.sql.datasource import DataSource
    from pyspark.sql.types import StructType

    from midstream.api.submit import StartOptions, Submission
    from midstream.connectors.files.table_source import OnChange, TableStart
    from midstream.connectors.kafka.client import OptionValue
    from midstream.connectors.kafka.kafka_source import OnGap
    from midstream.connectors.kafka.record_parser import KafkaFormat
    from midstream.connectors.kafka.source_bounds import Start, Stop, Topics
    from midstream.engine.coordinator.events import NewerOutput
    from midstream.inprocess.preview import Preview
    from midstream.runtime.driver.job import Job
    from midstream.runtime.process.slot_provider import SlotProvider

FILES_BEING_LOADED: list[str] = []
"""Paths of the job files that are being loaded, innermost last; their environments must not start by themselves."""


class Environment(Hinted):
    """One job: begin with a source, end with sinks, then call `execute()` or `start()`.

    Durations are texts such as "250 ms", "10 s", "5 min", "1 h", numbers of seconds, or timedeltas; sizes are numbers
    of bytes, or texts such as "64 MiB".

    `name`: the name of the job in messages, displays and records.
    `parallelism`: the number of subtasks of operators that do not set it, and so, usually, the number of slots.
    By default 1, or the lower bound of `autoscale`.
    `max_parallelism`: the number of key groups, up to 32768; it cannot change for a job that resumes from its
    checkpoints.
    `autoscale`: `(2, 16)` lets the job choose its parallelism between these by its load, and change it while it runs.
    "advise": it only reports, on its status and its page, which parallelism would be better. None: neither.
    `checkpoint_dir`: a directory or storage URL that all slots reach; without one a failure starts the job over.
    `checkpoint_interval`: the time from the start of one checkpoint to the next; None for no periodic checkpoints.
    `checkpoint_timeout`: a checkpoint that takes longer fails.
    `aligned_timeout`: how long a checkpoint's barriers wait for rows in flight before they overtake and store them; 0
    for immediately, None for never.
    `min_pause`: the minimum time from the end of one checkpoint to the start of the next.
    `tolerable_failures`: if more checkpoints than this fail in a row, the job restarts.
    `retained_checkpoints`: how many completed checkpoints are kept at least.
    `restart`: `no_restart()`, `fixed_restarts(…)` or `exponential_restarts(…)`; the default restarts until the same
    failure has occurred ten times in a row without a checkpoint in between.
    `state_memory`: how much state each slot holds in memory; what is above lies on its local disk, but for values of
    process functions that have no type. "auto" is half of the memory that the slot may use; "unlimited" moves nothing.
    `tls`: whether connections between driver, slots and commands are encrypted. "auto" encrypts them unless all
    processes run on this machine; "on" and "off" apply everywhere. A directory: with the certificate in its files
    tls.crt, tls.key and ca.crt, which every machine has, in place of one that each start of the job makes.
    `trusted_packages`: packages whose objects untyped state may hold, in addition to plain values and objects of the job's own
    classes. Reading a checkpoint can then call any function of these packages.
    `tuning`: sizes and limits that hardly any job changes: `Tuning(pool_size="256 MiB")`.
    `modules`: Python files, directories of packages, and zips that slots need in addition to the modules whose import is
    visible in the program's text.

    Raises ConfigError for a setting with an impossible value.

        env = Environment("visits", parallelism=2, checkpoint_dir="state/visits")
        env.read_files("in/*.parquet").filter(pl.col("ms") > 0).write_parquet("out")
        env.execute()
    """

    _hints = OF_ENVIRONMENTS

    @located
    def __init__(  # noqa: PLR0913 - what users may choose
        self,
        name: str = "job",
        *,
        parallelism: int | None = None,
        max_parallelism: int = 128,
        autoscale: tuple[int, int] | Literal["advise"] | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        checkpoint_interval: Duration | None = "10 s",
        checkpoint_timeout: Duration = "10 min",
        aligned_timeout: Duration | None = "1 s",
        min_pause: Duration = 0,
        tolerable_failures: int = 3,
        retained_checkpoints: int = 2,
        restart: RestartStrategy | None = None,
        state_memory: Size = "auto",
        tls: str | os.PathLike[str] = "auto",
        trusted_packages: Iterable[str] = (),
        tuning: Tuning | None = None,
        modules: Iterable[str | os.PathLike[str]] = (),
    ) -> None:
        if not isinstance(name, str):
            raise ConfigError(f"name: {name!r} is not a text")
        if restart is not None and not isinstance(restart, RestartStrategy):
            raise ConfigError(
                f"restart: {restart!r} is not a strategy; use no_restart(), fixed_restarts(3) or exponential_restarts()"
            )
        if tuning is not None and not isinstance(tuning, Tuning):
            raise ConfigError(f"tuning: {tuning!r} is not a Tuning; use Tuning(pool_size='256 MiB')")
        tuned = tuning or Tuning()
        bounds = _autoscale(autoscale, _whole(max_parallelism, "max_parallelism"))
        if parallelism is None:
            parallelism = 1 if bounds is None else bounds.min
        config = JobConfig(
            name=name,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            autoscale=bounds,
            checkpoint_dir=_directory(checkpoint_dir),
            checkpoint_interval_s=None
            if checkpoint_interval is None
            else duration_s(checkpoint_interval, "checkpoint_interval"),
            checkpoint_timeout_s=duration_s(checkpoint_timeout, "checkpoint_timeout"),
            aligned_timeout_s=_aligned_timeout_s(aligned_timeout),
            queue_time_s=None if tuned.queue_time is None else interval_s(tuned.queue_time, "queue_time"),
            min_pause_s=duration_s(min_pause, "min_pause"),
            tolerable_failures=_whole(tolerable_failures, "tolerable_failures"),
            retained_checkpoints=_whole(retained_checkpoints, "retained_checkpoints"),
            restart=restart or DEFAULT_RESTART,
            buffer_bytes=size_bytes(tuned.buffer_size, "buffer_size"),
            pool_bytes=size_bytes(tuned.pool_size, "pool_size"),
            batch_rows=_whole(tuned.batch_rows, "batch_rows"),
            slot_timeout_s=duration_s(tuned.slot_timeout, "slot_timeout"),
            heartbeat_timeout_s=duration_s(tuned.heartbeat_timeout, "heartbeat_timeout"),
            state_memory=_state_memory(state_memory),
            tls=_tls(tls),
            trusted_packages=_packages(trusted_packages),
        ).check()
        self.program = Program(config, job_file(calling_file(), calling_module()), check_extra(modules))
        note_modules()

    def __repr__(self) -> str:
        return f"Environment({self.name!r}, {len(self.program.graph.nodes)} operators)"

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.program.config.name

    # ---- sources

    @located
    def source(self, source: Source) -> DataStream:
        """Read from a source.

        `source`: one of `midstream.connectors`, or an instance of your own subclass of Source.

        Returns a stream with the columns of the source's `schema`. Raises JobError for anything that is not a Source.

            >>> from midstream.connectors import FileSource
            >>> pl.DataFrame({"n": [1, 2]}).write_parquet("numbers.parquet")
            >>> env.source(FileSource("numbers.parquet")).uid("numbers").preview().rows
            [{'n': 1}, {'n': 2}]
        """
        if not isinstance(source, Source):
            raise JobError(
                f"source: {source!r} is not a Source; make one first, for example FileSource('in/*.parquet')"
            )
        return self._begin(type(source).__name__.removesuffix("Source").lower() or "source", source)

    @located
    def read_files(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        format: Format | None = None,
        schema: SchemaLike | None = None,
        watch: bool = False,
        interval: Duration = "1 s",
        csv: CsvOptions | None = None,
        on_bad_record: OnBadRecord = "fail",
        bad_records_max: BadRecordsMax | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        rows_per_s: float | None = None,
    ) -> DataStream:
        """Read Parquet, CSV or JSON lines, once, or continuously as new files appear.

        `path`: a path, a glob, a directory (recursively), or a list of these; local ones or URLs that pyarrow knows (file,
        s3, gs, hdfs …). Of folders below it that are called `day=2026-11-30`, as Spark writes them, `day` is a column that the
        files lack: text, unless `schema` has another type.
        `format`: "parquet", "csv" or "jsonl"; by default from the suffix (.parquet, .csv, .jsonl; the latter two also
        with .gz, .bz2, .zst or .zip).
        `schema`: the columns to read; other columns are then ignored. One that a file or a line lacks is null, unless
        its field is `nullable=False`. By default those of the first file, and all files must have the same ones.
        `watch`: never end, and check for new files, which are read in order of modification time, each once it has not
        changed for 2 s.
        `interval`: how often the source checks for new files. It grows if a listing, of 100,000s of files, would take
        more than a tenth of it.
        `csv`: how CSV files are written.
        `on_bad_record`: of lines that cannot be read: "fail", or "drop", and `side_output(BAD_RECORDS)` of the stream
        has them.
        `bad_records_max`: with "drop": `(100, 10_000)` fails the job when more than 100 of 10,000 lines that a subtask
        reads are bad; None for no limit.
        `filesystem`: a pyarrow filesystem, with `path` in it; by default that of the path.
        `rows_per_s`: a limit for all subtasks together, in rows per second; None for none.

        Returns a stream of the files' rows. Raises ConfigError (no such file, unknown format), StorageError (an
        unreadable file) or SchemaError (files with different columns), here for the first file and otherwise when a
        file is read.

            >>> pl.DataFrame({"n": [1, 2], "word": ["a", "b"]}).write_csv("words.csv")
            >>> env.read_files("*.csv").preview().rows
            [{'n': 1, 'word': 'a'}, {'n': 2, 'word': 'b'}]
        """
        columns = None if schema is None else as_declared(schema, "read_files")
        source = FileSource(
            path,
            format=format,
            schema=columns,
            watch=watch,
            interval=interval,
            csv=csv,
            on_bad_record=on_bad_record,
            bad_records_max=bad_records_max,
            filesystem=filesystem,
            rows_per_s=rows_per_s,
        )
        return self._begin("files", source)

    @located
    def read_kafka(  # noqa: PLR0913 - what users may choose
        self,
        servers: str | Sequence[str],
        topics: Topics,
        *,
        format: KafkaFormat = "json",
        schema: SchemaLike | str | None = None,
        csv: CsvOptions | None = None,
        registry: Mapping[str, OptionValue] | None = None,
        message: object = None,
        start: Start = "earliest",
        stop: Stop | None = None,
        metadata: Mapping[str, str] | Sequence[str] = (),
        on_gap: OnGap = "fail",
        on_bad_record: OnBadRecord = "fail",
        bad_records_max: BadRecordsMax | None = None,
        options: Mapping[str, OptionValue] | None = None,
        interval: Duration = "30 s",
        rows_per_s: float | None = None,
    ) -> DataStream:
        """Read topics of Kafka (2.5 or later); each partition is a split.

        Needs `pip install 'midstream[kafka]'`.

        `servers`: one or more `host:port`, as a list or separated by commas.
        `topics`: a name, a list of names, or a compiled pattern that must match the whole name.
        `format`: "json" (objects, as `schema` says, by the rules of JSON lines), "csv" (a line without a header), "avro"
        (each value with the id of its schema in `registry`, read by the rules of Avro), "protobuf" (the message class
        `message`, whose fields are the columns; with a `registry` each value begins with the id of its schema),
        "debezium" (changes of a database, in JSON, or in Avro with a `registry`: the columns of the row after the
        change, of a delete before it, and `_op`, which is insert, update or delete; records without a value are left
        out), "bytes" or "text" (one column `value`).
        `schema`: the columns of "json", of the rows of "debezium", or of "csv" in their order. Of Avro the text of a
        schema, by default the newest version of the subject `<topic>-value`.
        `csv`: how a record of "csv" is written.
        `registry`: options of a schema registry, such as `{"url": "http://registry:8081"}`.
        `message`: the generated message class, for "protobuf".
        `start`: where a new job begins: "earliest", "latest", "group" (the committed offsets of the group `group.id`,
        else the earliest), a datetime with a zone (the first record that is not older), or, for a single topic, an
        offset for each partition. A job that resumes continues where it was.
        `stop`: "latest" (what exists and is committed when the job starts) or a datetime with a zone (up to the first
        record that is not older); None for never. A job that resumes keeps the stop that its checkpoint has; if the
        checkpoint is of a job without one, "latest" is the end at the time of the resume, from its first checkpoint on.
        `metadata`: parts of a record to add as columns: topic, partition, offset, timestamp, key, headers; a dict
        renames them.
        `on_gap`: of offsets that the broker no longer has: "fail", or "skip" to continue after them.
        `on_bad_record`, `bad_records_max`: as for `read_files`, of records.
        `options`: librdkafka's, such as those of SASL and TLS; a value `env:NAME` or `file:/path` is replaced where the
        job connects.
        `interval`: how often the source checks for new topics that match, and for new partitions; they are read from
        their beginning.
        `rows_per_s`: a limit for all subtasks together, in rows per second; None for none.

        Returns a stream of the records. Raises ConfigError or SchemaError for invalid arguments; the cluster is queried
        when the job starts.

            env.read_kafka("kafka-1:9092", "orders", schema={"user": str, "price": int}).uid("orders")
        """
        from midstream.connectors.kafka.kafka_source import KafkaSource

        source = KafkaSource(
            servers,
            topics,
            format=format,
            schema=schema if schema is None or isinstance(schema, str) else as_declared(schema, "read_kafka"),
            csv=csv,
            registry=registry,
            message=message,
            start=start,
            stop=stop,
            metadata=metadata,
            on_gap=on_gap,
            on_bad_record=on_bad_record,
            bad_records_max=bad_records_max,
            options=options,
            interval=interval,
            rows_per_s=rows_per_s,
        )
        check_shippable(source, "read_kafka")
        return self._begin("kafka", source)

    @located
    def read_delta(
        self,
        table: str | os.PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        watch: bool = False,
        start: TableStart | None = None,
        on_change: OnChange = "fail",
        changes: bool = False,
        key: Sequence[str] = (),
        interval: Duration = "1 s",
        storage_options: Mapping[str, str] | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        rows_per_s: float | None = None,
    ) -> DataStream:
        """Read a Delta table: its rows, and with `watch` those that later versions add.

        Needs `pip install 'midstream[delta]'`.

        `table`: a local path, or a URL that pyarrow and deltalake know (s3://…).
        `columns`: the columns to read, by default all; those that are added to the table later are then ignored.
        Without `columns` such a column ends the job, and is read by the next start.
        `watch`: never end, and read new versions.
        `start`: where a new job begins: None (the table as it is), a version, "latest" (what is added from now on), or a
        datetime with a zone (what was added from then on).
        `on_change`: of versions that delete or update rows: "fail", or "skip" to ignore all that such a version does,
        also the rows that it adds.
        `changes`: read what versions do to rows, in their order, in one subtask. Each row has a column `_op`: "insert"
        (also the rows that the table has at the beginning), "update" or "delete". A table that records its changes
        (delta.enableChangeDataFeed) has fewer; otherwise a file that is rewritten is deleted and inserted row by row.
        `key`: with `changes`, the columns that identify a row: if an update changes them, the row under the old key is
        deleted. Without it, a recorded update says nothing of that row.
        `interval`: how often the source checks for new versions.
        `storage_options`: what deltalake needs to read the log there; only deltalake, on the driver, receives them.
        `filesystem`: the pyarrow filesystem that files are read with, by default that of the URL.
        `rows_per_s`: a limit for all subtasks together, in rows per second; None for none.

        Returns a stream of the table's rows. Raises ConfigError if there is no such table, or if it cannot be read,
        SchemaError for columns that do not exist, StorageError if it cannot be reached.

            >>> pl.DataFrame({"n": [1, 2]}).write_delta("sizes")
            >>> env.read_delta("sizes").preview().rows
            [{'n': 1}, {'n': 2}]
        """
        from midstream.connectors.delta.delta_source import DeltaSource

        source = DeltaSource(
            table,
            columns=columns,
            watch=watch,
            start=start,
            on_change=on_change,
            changes=changes,
            key=key,
            interval=interval,
            storage_options=storage_options,
            filesystem=filesystem,
            rows_per_s=rows_per_s,
        )
        check_shippable(source, "read_delta")
        return self._begin("delta", source)

    @located
    def read_iceberg(
        self,
        table: str,
        *,
        catalog: str | Mapping[str, str] | Catalog,
        columns: Sequence[str] | None = None,
        watch: bool = False,
        start: TableStart | None = None,
        on_change: OnChange = "fail",
        interval: Duration = "1 s",
        filesystem: pyarrow.fs.FileSystem | None = None,
        rows_per_s: float | None = None,
    ) -> DataStream:
        """Read an Iceberg table: its rows, and with `watch` those that later snapshots add.

        Needs `pip install 'midstream[iceberg]'`.

        `table`: its identifier in the catalog, such as "lake.orders".
        `catalog`: the name of a catalog that pyiceberg is configured with, or its properties (`{"type": "rest", "uri":
        …}`), or a pyiceberg Catalog. Only the driver uses it.
        `columns`: the columns to read, by default all; those that are added to the table later are then ignored.
        Without `columns` such a column ends the job, and is read by the next start.
        `watch`: never end, and read new snapshots.
        `start`: where a new job begins: None (the table as it is), the id of a snapshot, "latest" (what is added from
        now on), or a datetime with a zone (what was added from then on).
        `on_change`: of snapshots that delete or update rows: "fail", or "skip" to ignore all that such a snapshot does,
        also the rows that it adds.
        `interval`: how often the source checks for new snapshots.
        `filesystem`: the pyarrow filesystem that files are read with, by default that of their location with the
        catalog's credentials.
        `rows_per_s`: a limit for all subtasks together, in rows per second; None for none.

        Returns a stream of the table's rows. Raises ConfigError if there is no such table, or if it cannot be read,
        SchemaError for columns that do not exist, StorageError if catalog or table cannot be reached.

            env.read_iceberg("lake.orders", catalog="prod", watch=True).uid("orders")
        """
        from midstream.connectors.iceberg.iceberg_source import IcebergSource

        source = IcebergSource(
            table,
            catalog=catalog,
            columns=columns,
            watch=watch,
            start=start,
            on_change=on_change,
            interval=interval,
            filesystem=filesystem,
            rows_per_s=rows_per_s,
        )
        check_shippable(source, "read_iceberg")
        return self._begin("iceberg", source)

    @located
    def read_postgres_changes(
        self,
        dsn: str,
        table: str,
        *,
        slot: str,
        schema: str | None = None,
        publication: str | None = None,
        columns: Sequence[str] | None = None,
        snapshot: bool = True,
        rows_per_s: float | None = None,
    ) -> DataStream:
        """Read a PostgreSQL table (13 or later): its rows, then each insert, update and delete, by logical replication.

        Needs `pip install 'midstream[postgres]'`. Rows have a column `_op`: insert, update or delete.

        `dsn`: a connection string of libpq. Give the password as PGPASSWORD or in a password file on each node; one in
        `dsn` is sent to the slots with the job, and is neither stored nor shown. The user needs the right REPLICATION,
        SELECT on the table, and for a publication that is to be created, to own it.
        `table`: the table; it needs a primary key, or a replica identity FULL.
        `slot`: the name of the replication slot, which is created when the job starts without a checkpoint; with
        --fresh it is dropped and created again. Each job needs its own. It keeps the server's log until it is dropped:
        `SELECT pg_drop_replication_slot('…')`.
        `schema`: the table's schema; by default the first in the search path that has the table.
        `publication`: a publication that has the table; by default one with the slot's name. It is created if there is
        none.
        `columns`: the columns to read, by default all that are not generated. Columns that are added later are ignored;
        one that is dropped, or changes its type, ends the job.
        `snapshot`: False: without the rows that the table has when the job starts.
        `rows_per_s`: a limit, in rows per second; None for none.

        Returns a stream of the changes in their order. Raises ConfigError for a table whose changes cannot be read,
        SchemaError for columns that do not exist, StorageError if the server cannot be reached.

            env.read_postgres_changes("host=db dbname=shop", "orders", slot="orders_stream").uid("orders")
        """
        from midstream.connectors.postgres.postgres_changes import PostgresChangesSource

        source = PostgresChangesSource(
            dsn,
            table,
            slot=slot,
            schema=schema,
            publication=publication,
            columns=columns,
            snapshot=snapshot,
            rows_per_s=rows_per_s,
        )
        check_shippable(source, "read_postgres_changes")
        return self._begin("postgres", source)

    @located
    def from_collection(
        self,
        data: Iterable[Mapping[str, Any]] | pa.Table | pa.RecordBatch | pl.DataFrame,
        schema: SchemaLike | None = None,
        *,
        splits: int | None = None,
        rows_per_s: float | None = None,
    ) -> DataStream:
        """Read rows from memory; they travel with the job, so this is for small inputs and tests.

        `data`: dicts, an Arrow table or record batch, or a polars DataFrame.
        `schema`: the columns of the dicts, by default inferred from all of them; a dict may lack columns, which are
        then null.
        `splits`: how many parts the rows are cut into, and so how many subtasks can read concurrently; by default the
        parallelism. 1 keeps all rows in order.
        `rows_per_s`: a limit for all subtasks together, in rows per second; None for none.

        Returns a stream of the rows. Raises SchemaError for a value that does not fit its column and if there is no row
        to infer columns from, JobError for data that is not a collection of rows and for a schema given with a table,
        ConfigError for an impossible number.

            >>> rows = env.from_collection([{"n": 1, "x": 0.5}, {"n": 2}])
            >>> testing.run(rows).rows
            [{'n': 1, 'x': 0.5}, {'n': 2, 'x': None}]
        """
        if isinstance(data, (pa.Table, pa.RecordBatch, pl.DataFrame)):
            if schema is not None:
                raise JobError("from_collection: schema= is for dicts; a table has its own, cast it first")
            table = to_arrow(data) if isinstance(data, pl.DataFrame) else data
            return self._begin("collection", CollectionSource(table, splits=splits, rows_per_s=rows_per_s))
        if isinstance(data, (str, bytes, Mapping)) or not isinstance(data, Iterable):
            raise JobError(
                f"from_collection: a {type(data).__name__} is no collection of rows; "
                "give a list of dicts, an Arrow table or a polars DataFrame"
            )
        columns = None if schema is None else as_schema(schema, "from_collection")
        return self._begin("collection", from_rows(data, columns, splits=splits, rows_per_s=rows_per_s))

    @located
    def generate(
        self,
        function: Generate,
        count: int | None = None,
        *,
        schema: SchemaLike | None = None,
        splits: int | None = None,
        rows_per_s: float | None = None,
    ) -> DataStream:
        """Compute a row for each index from 0.

        `function`: takes an int64 array of indices and returns as many rows, as a record batch, a polars DataFrame or a
        dict of columns; the same indices must always give the same rows.
        `count`: the number of rows; None for a source that never ends.
        `schema`: the columns of the rows, by default those that the function returns.
        `splits`: how many subtasks can read concurrently, by default one per subtask; without `count`, 16. With `count`, 1
        keeps all rows in order.
        `rows_per_s`: a limit for all subtasks together, in rows per second; None for none.

        Returns a stream of the rows. Raises JobError for a function that cannot be called, cannot be sent to the slots,
        fails, or returns something other than rows; SchemaError for columns that do not fit; ConfigError for an
        impossible number.

            >>> numbers = env.generate(lambda i: {"n": i, "user": i % 2}, count=3)
            >>> testing.run(numbers).rows
            [{'n': 0, 'user': 0}, {'n': 1, 'user': 1}, {'n': 2, 'user': 0}]
        """
        require_callable(function, "generate", "write for example generate(lambda i: {'n': i}, count=1000)")
        check_shippable(function, "generate")
        columns = None if schema is None else as_schema(schema, "generate")
        return self._begin(
            "generate", GeneratorSource(function, count, schema=columns, splits=splits, rows_per_s=rows_per_s)
        )

    @located
    def from_dataframe(self, frame: DataFrame, *, rows_per_s: float | None = None) -> DataStream:
        """Read the rows of a bounded Spark DataFrame as they are when the job starts; they are staged once, as files.

        `frame`: a DataFrame of the active Spark session. A streaming DataFrame, or a column whose values would change
        on the way, is refused.
        `rows_per_s`: a limit for all subtasks together, in rows per second; None for none.

        Returns a stream of the rows. Raises ConfigError for anything that is not such a DataFrame, SchemaError for a
        type without an Arrow form.

            env.from_dataframe(spark.read.table("orders").where("price > 3")).uid("orders")
        """
        from midstream.spark.dataframe import DataFrameSource

        return self._begin("dataframe", DataFrameSource(frame, rows_per_s=rows_per_s))

    @located
    def from_datasource(
        self,
        data_source: type[DataSource] | DataSource,
        *,
        streaming: bool = False,
        options: Mapping[str, str] | None = None,
        schema: StructType | str | None = None,
        interval: Duration = "1 s",
        rows_per_s: float | None = None,
    ) -> DataStream:
        """Read a PySpark Python Data Source.

        `data_source`: its class, or an instance.
        `streaming`: read its stream reader, without end, instead of its batch reader.
        `options`: the options for a class, as strings.
        `schema`: a Spark schema or its DDL text; by default that of the Data Source.
        `interval`: how often the latest offset is requested from a stream reader.
        `rows_per_s`: a limit for all subtasks together, in rows per second; None for none.

        Returns a stream of the rows. Raises ConfigError for a Data Source without such a reader, SchemaError for a type
        without an Arrow form, JobError for what its methods raise.

            env.from_datasource(MyQueue, streaming=True, options={"queue": "orders"}).uid("orders")
        """
        from midstream.spark.datasource import DataSourceBatchSource, DataSourceStreamSource

        if streaming:
            return self._begin(
                "datasource",
                DataSourceStreamSource(
                    data_source, options=options, schema=schema, interval=interval, rows_per_s=rows_per_s
                ),
            )
        return self._begin(
            "datasource", DataSourceBatchSource(data_source, options=options, schema=schema, rows_per_s=rows_per_s)
        )

    def _begin(self, kind: str, source: Source) -> DataStream:
        node = self.program.add_source(kind, source)
        sides = {BAD_RECORDS: (BAD_RECORDS_SCHEMA, None)} if source.drops_bad_records else {}
        return main_output(StreamCore(self.program, (Origin(node.id),), source.schema, side_outputs=sides))

    # ---- running it

    def explain(self) -> str:
        """Return the job graph as text: chains of operators, their parallelism, and the partitioning between them.

        Raises JobError or ConfigError for a program that cannot run, for example one with a stream that leads to no
        sink.

            >>> env = Environment("shop", parallelism=2)
            >>> _ = env.from_collection([{"n": 1}]).filter(pl.col("n") > 0).rebalance().print()
            >>> print(env.explain())
            2 vertices, 2 slots, at most 128 key groups
            [0] ×2  collection → filter
            [1] ×2  print
                  ← [0] rebalance
        """
        return describe_text(build_job_graph(self.program.graph, self.program.config))

    @located
    def preview(self, rows: int = 20, *, seconds: float = 1.0) -> list[Preview]:
        """Return the first rows of each stream that the job ends with, computed in this process; sinks are not written
        to.

        `rows`: the number of rows of each stream at most.
        `seconds`: about how long to read, in seconds.

        Returns a list of Previews, one for each sink. Raises as `DataStream.preview` does.

            >>> env = Environment("shop")
            >>> _ = env.from_collection([{"n": 5}, {"n": 8}, {"n": 9}]).filter(pl.col("n") > 7).print()
            >>> [found] = env.preview(2)
            >>> found.rows
            [{'n': 8}, {'n': 9}]
        """
        from midstream.inprocess.preview import preview

        return preview(self.program.graph, self.program.config, None, rows, seconds, time.time_ns() // 1000)

    def execute(
        self,
        *,
        parallelism: int | None = None,
        master: str | None = None,
        restore_from: str | int | None = None,
        allow_dropped_state: bool = False,
        newer_output: NewerOutput | None = None,
        fresh: bool = False,
        resume: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        aligned_timeout: Duration | None = None,
        slots: SlotProvider | None = None,
    ) -> JobStatus:
        """Run the job to its end. Ctrl-C ends it without a checkpoint.

        `parallelism`, `checkpoint_dir`, `aligned_timeout`: override the environment's.
        `master`: a Spark master URL; by default the active Spark session, else `local[*]`.
        `restore_from`: "latest", the id or path of a checkpoint, or the path of a savepoint; None for a new start.
        `allow_dropped_state`: resume even if the checkpoint has state that the job no longer has.
        `newer_output`: what happens to committed output that is newer than the checkpoint: "rollback" or "keep"; see
        `start`.
        `fresh`: start over, although `checkpoint_dir` has completed checkpoints of the job; such a start is refused
        without `fresh`, `resume` and `restore_from`.
        `resume`: resume from the newest checkpoint, or begin if none was completed; see `start`.
        `slots`: where the job runs instead of Spark: `midstream.ProcessSlots()` for plain processes of this machine.

        Returns the final JobStatus. Raises the error that the job failed with (JobError for an error of a user's
        function), and what `start` raises.

            status = env.execute(parallelism=4, restore_from="latest")
            assert status.state == "finished"
        """
        job = self.start(
            parallelism=parallelism,
            master=master,
            restore_from=restore_from,
            allow_dropped_state=allow_dropped_state,
            newer_output=newer_output,
            fresh=fresh,
            resume=resume,
            checkpoint_dir=checkpoint_dir,
            aligned_timeout=aligned_timeout,
            slots=slots,
        )
        try:
            return job.wait()
        except KeyboardInterrupt:
            job.cancel("interrupted")
            raise

    def start(
        self,
        *,
        parallelism: int | None = None,
        master: str | None = None,
        restore_from: str | int | None = None,
        allow_dropped_state: bool = False,
        newer_output: NewerOutput | None = None,
        fresh: bool = False,
        resume: bool = False,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        aligned_timeout: Duration | None = None,
        slots: SlotProvider | None = None,
    ) -> Job:
        """Start the job and return its handle immediately.

        `parallelism`, `checkpoint_dir`, `aligned_timeout`: override the environment's.
        `master`: a Spark master URL; by default the active Spark session, else `local[*]`.
        `restore_from`: "latest", the id or path of a checkpoint, or the path of a savepoint; None for a new start.
        `allow_dropped_state`: resume even if the checkpoint has state that the job no longer has.
        `newer_output`: what happens to committed output that is newer than the checkpoint: "rollback" makes the sinks
        remove it, "keep" leaves it, and its rows are there twice.
        `fresh`: start over, although `checkpoint_dir` has completed checkpoints of the job; such a start is refused
        without `fresh`, `resume` and `restore_from`.
        `resume`: resume from the newest checkpoint, and print which to the standard error, or begin if none was
        completed; for programs that a supervisor starts again. A start with `fresh` that has completed none is begun again.
        `slots`: where the job runs instead of Spark: `midstream.ProcessSlots()` for plain processes of this machine.

        Returns a Job. Raises JobError, ConfigError or SchemaError if the program cannot be run, StorageError or
        ClusterError if its environment does not permit it.

            job = env.start(checkpoint_dir="state/visits")
            job.checkpoint()
            job.stop(drain=True)
        """
        from midstream.api.submit import StartOptions

        options = StartOptions(
            parallelism=parallelism,
            master=master,
            restore_from=restore_from,
            allow_dropped_state=allow_dropped_state,
            newer_output=newer_output,
            fresh=fresh,
            resume=resume,
            checkpoint_dir=checkpoint_dir,
            aligned_timeout=aligned_timeout,
            slots=slots,
        )
        submission = self.submission(options)
        if submission.resumption:
            sys.stderr.write(f"{submission.resumption}\n")
        return submission.start()

    def submission(self, options: StartOptions) -> Submission:
        """Run the checks of `start` that need neither Spark nor slots, with the same arguments and errors."""
        if FILES_BEING_LOADED:
            raise JobError(
                f"{calling_line()}: starts the job while its file is being loaded; midstream run starts it itself, "
                'so put the call under: if __name__ == "__main__":'
            )
        from midstream.api.submit import submission

        config = self.program.config
        if options.parallelism is not None:
            check_parallelism(options.parallelism, config.max_parallelism, "the job")
            config = msgspec.structs.replace(config, parallelism=options.parallelism)
        if options.checkpoint_dir is not None:
            config = msgspec.structs.replace(config, checkpoint_dir=_directory(options.checkpoint_dir))
        if options.aligned_timeout is not None:
            config = msgspec.structs.replace(config, aligned_timeout_s=_aligned_timeout_s(options.aligned_timeout))
        if options.newer_output not in (None, "rollback", "keep"):
            raise ConfigError(f"newer_output: {options.newer_output!r} is neither 'rollback' nor 'keep'")
        return submission(self.program.graph, config.check(), self.program.collected, options)


def _directory(path: str | os.PathLike[str] | None) -> str | None:
    """Return an absolute path if it is local, since slots have working directories of their own."""
    if path is None:
        return None
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"checkpoint_dir: {path!r} is not a directory or a storage URL")
    return _absolute(text, "checkpoint_dir")


def _tls(tls: str | os.PathLike[str]) -> str:
    """A directory is absolute: slots have working directories of their own."""
    text = os.fspath(tls) if isinstance(tls, (str, os.PathLike)) else tls
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"tls: {tls!r} is not 'auto', 'on', 'off', or a directory with a certificate")
    return text if text in ("auto", "on", "off") else _absolute(text, "tls")


def _absolute(path: str, name: str) -> str:
    try:
        return absolute(path)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from error


def _state_memory(size: Size) -> int | Literal["auto", "unlimited"]:
    if size == "auto":
        return "auto"
    if size == "unlimited":
        return "unlimited"
    try:
        return size_bytes(size, "state_memory")
    except ConfigError as error:
        raise ConfigError(f"{error}, or 'auto' or 'unlimited'") from None


def _autoscale(bounds: tuple[int, int] | Literal["advise"] | None, most: int) -> AutoscaleBounds | None:
    if bounds is None:
        return None
    if bounds == "advise":
        return AutoscaleBounds(1, most, is_advice=True)
    if not isinstance(bounds, (tuple, list)) or len(bounds) != 2:
        raise ConfigError(f"autoscale: {bounds!r} is not a pair of bounds such as (2, 16), nor 'advise'")
    return AutoscaleBounds(_whole(bounds[0], "autoscale"), _whole(bounds[1], "autoscale"))


def _aligned_timeout_s(timeout: Duration | None) -> float | None:
    return None if timeout is None else duration_s(timeout, "aligned_timeout")


def _whole(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name}: {value!r} is not a whole number")
    return value


def _packages(names: Iterable[str]) -> tuple[str, ...]:
    found = (names,) if isinstance(names, str) else tuple(names)
    for name in found:
        if not isinstance(name, str) or not name.isidentifier():
            raise ConfigError(f"trusted_packages: {name!r} is not the name of a package, such as 'sklearn'")
    return found
