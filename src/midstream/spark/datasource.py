"""Any PySpark Python Data Source as a source, its batch reader or its stream reader, exactly once."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from midstream.core.config import Duration
from midstream.operators.source import Discovery, DiscoveryContext, Source, Split, SplitReader


class DataSourceBatchSource(Source):
    """The partitions of `data_source.reader(schema)`, read once to the end.

    `data_source`: a subclass of DataSource, made with `options`, or an instance. `schema`: a StructType
    or DDL text, by default what its `schema()` says. `read(partition)` must give the same rows in the
    same order when it is called again.
    """

    def __init__(
        self,
        data_source: type[DataSource] | DataSource,
        *,
        options: Mapping[str, str] | None = None,
        schema: StructType | str | None = None,
        rows_per_s: float | None = None,
    ) -> None:
        raise NotImplementedError

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise NotImplementedError

    def open_split(self, split: Split) -> SplitReader:
        raise NotImplementedError


class DataSourceStreamSource(Source):
    """The offset ranges of `data_source.streamReader(schema)` (or `simpleStreamReader`), without end.

    `interval`: how often the latest offset is asked for. Other arguments as for the batch source.
    """

    def __init__(
        self,
        data_source: type[DataSource] | DataSource,
        *,
        options: Mapping[str, str] | None = None,
        schema: StructType | str | None = None,
        interval: Duration = "1 s",
        rows_per_s: float | None = None,
    ) -> None:
        raise NotImplementedError

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise NotImplementedError

    def open_split(self, split: Split) -> SplitReader:
        raise NotImplementedError
