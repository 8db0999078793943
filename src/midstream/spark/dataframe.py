"""A bounded Spark DataFrame as a source: staged once as Parquet, so that replay is deterministic."""

from __future__ import annotations

from pyspark.sql import DataFrame

from midstream.operators.source import Discovery, DiscoveryContext, Source, Split, SplitReader


class DataFrameSource(Source):
    """The rows of a DataFrame as they are when the job starts.

    `prepare`, called before any slot takes a core, has Spark write them as Parquet below the checkpoint
    directory (which must be reachable from all nodes), or into a temporary directory when there is
    none, which only a local master can use. Raises ConfigError for a streaming DataFrame, SchemaError
    for a type that has no Arrow form, ClusterError when Spark fails to write.
    """

    def __init__(self, frame: DataFrame, *, rows_per_s: float | None = None) -> None:
        raise NotImplementedError

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        raise NotImplementedError

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise NotImplementedError

    def open_split(self, split: Split) -> SplitReader:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
