"""Both ends of a job: sources and sinks for files, memory and Kafka; PostgreSQL, Delta and Iceberg tables as extras.

The classes of the built-in sources and sinks are imported from here, when they are first used; most jobs use the methods
of Environment and DataStream instead (`env.read_kafka`, `stream.write_kafka`).

Owns what a sink has prepared until it is committed, and nothing else. A folder whose system needs the
packages of an extra is imported only where it is used (`common.optional_packages`). May import the engine up to `operators`. Discovery, validation and commits run on the driver's I/O
pool; readers and encoders on a slot's I/O pool; on the loop thread, a writer only appends to a queue.

Folders by system: `files`, `memory`, `kafka`, `postgres`, `delta`, `iceberg`; `lookup` (tables of `join_table`), `formats` (Avro, Protobuf) and `common` are for all.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstream.connectors.common.hybrid_source import HybridSource as HybridSource
    from midstream.connectors.delta.delta_sink import DeltaSink as DeltaSink
    from midstream.connectors.delta.delta_source import DeltaSource as DeltaSource
    from midstream.connectors.files.file_sink import FileSink as FileSink
    from midstream.connectors.files.file_source import FileSource as FileSource
    from midstream.connectors.iceberg.iceberg_sink import IcebergSink as IcebergSink
    from midstream.connectors.iceberg.iceberg_source import IcebergSource as IcebergSource
    from midstream.connectors.kafka.kafka_sink import KafkaSink as KafkaSink
    from midstream.connectors.kafka.kafka_source import KafkaSource as KafkaSource
    from midstream.connectors.memory.collection_source import CollectionSource as CollectionSource
    from midstream.connectors.memory.generator_source import GeneratorSource as GeneratorSource
    from midstream.connectors.memory.print_sink import PrintSink as PrintSink
    from midstream.connectors.postgres.postgres_changes import PostgresChangesSource as PostgresChangesSource
    from midstream.connectors.postgres.postgres_query import PostgresQuery as PostgresQuery
    from midstream.connectors.postgres.postgres_sink import PostgresSink as PostgresSink

_MODULE_OF = {
    "CollectionSource": "memory.collection_source",
    "DeltaSink": "delta.delta_sink",
    "DeltaSource": "delta.delta_source",
    "FileSink": "files.file_sink",
    "FileSource": "files.file_source",
    "GeneratorSource": "memory.generator_source",
    "HybridSource": "common.hybrid_source",
    "IcebergSink": "iceberg.iceberg_sink",
    "IcebergSource": "iceberg.iceberg_source",
    "KafkaSink": "kafka.kafka_sink",
    "KafkaSource": "kafka.kafka_source",
    "PostgresChangesSource": "postgres.postgres_changes",
    "PostgresQuery": "postgres.postgres_query",
    "PostgresSink": "postgres.postgres_sink",
    "PrintSink": "memory.print_sink",
}

__all__ = sorted(_MODULE_OF)  # noqa: PLE0605 - the same names as above; a test compares


if not TYPE_CHECKING:  # a type checker has the names above, and that there are no others

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
