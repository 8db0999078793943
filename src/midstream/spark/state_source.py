"""The state of a job as a Spark DataFrame: a Python Data Source with a partition for each subtask of the operator."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from midstream.engine.checkpoint.stored_states import Readable
from midstream.engine.core.arrow_types import is_bytes, is_list, is_text
from midstream.engine.core.batches import conform, single_batch, to_arrow
from midstream.engine.core.errors import ConfigError
from midstream.runtime.storage.file_storage import FileStorage, absolute
from midstream.runtime.storage.stored_checkpoint import OpenedCheckpoint, open_checkpoint
from midstream.spark.datasource_rows import spark_struct

_ROWS_OF_BATCH: Final = 65_536
_OPTIONS: Final = ("path", "uid", "name")
_SIGNED: Final[dict[pa.DataType, pa.DataType]] = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20),
}


class StateSource(DataSource):
    """The Spark format `midstream`: a state of a job, read from a checkpoint or savepoint.

    Options: `path` and `uid`, and `name` unless the operator has only one state; as those of `midstream.read_state`, whose
    columns the DataFrame has. Executors read the files themselves, one partition for each subtask of the operator, so they
    must reach the path, and have midstream installed. Of a running job, read a savepoint: it deletes old checkpoints.

        spark.dataSource.register(StateSource)
        waiting = spark.read.format("midstream").option("uid", "open-orders").option("name", "ordered_at")
        waiting.load("saved/orders").where("order = 17").show()
    """

    @classmethod
    def name(cls) -> str:
        return "midstream"

    def schema(self) -> StructType:
        opened, state = self._opened()
        where = f"state {state.name!r} of operator {state.uid!r}"
        found = to_arrow(state.empty_frame(opened.storage, opened.path)).schema
        return spark_struct(_spark_forms(found), where)

    def reader(self, schema: StructType) -> DataSourceReader:
        opened, state = self._opened()
        return _StateReader(absolute(opened.root), opened.path, state, schema)

    def _opened(self) -> tuple[OpenedCheckpoint, Readable]:
        unknown = [option for option in self.options if option.lower() not in _OPTIONS]
        missing = [option for option in _OPTIONS[:2] if not self.options.get(option)]
        if unknown or missing:
            what = f"has no option {unknown[0]!r}" if unknown else f"needs the option {missing[0]!r}"
            raise ConfigError(
                f"the format midstream {what}; give path (of a checkpoint or savepoint), uid (of the operator), and name (of "
                "the state), as midstream state PATH lists them"
            )
        opened = open_checkpoint(self.options["path"])
        return opened, opened.state(self.options["uid"], self.options.get("name"))


@dataclass
class _SubtaskPart(InputPartition):
    state: Readable
    """With what one subtask has of it."""


class _StateReader(DataSourceReader):
    def __init__(self, root: str, where: str, state: Readable, schema: StructType) -> None:
        self._root = root
        self._where = where
        self._state = state
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        return [_SubtaskPart(state) for state in self._state.by_subtask()]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _SubtaskPart), partition
        state, names = partition.state, self._schema.names
        where = f"{self._where}: state {state.name!r} of operator {state.uid!r}"
        for frame in state.frames(FileStorage(self._root), self._where):
            for some in frame.select(names).iter_slices(_ROWS_OF_BATCH):
                batch = single_batch(to_arrow(some))
                yield conform(batch, _spark_forms(batch.schema), where)


def _spark_forms(schema: pa.Schema) -> pa.Schema:
    return pa.schema([(field.name, _spark_form(field.type)) for field in schema])


def _spark_form(kind: pa.DataType) -> pa.DataType:
    """Return the Arrow type, among those that Spark has, in which all values of a type are the same."""
    types = pa.types
    if kind in _SIGNED:
        return _SIGNED[kind]
    if types.is_float16(kind):
        return pa.float32()
    if is_text(kind):
        return pa.string()
    if is_bytes(kind):
        return pa.binary()
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if types.is_duration(kind):
        return pa.duration("us")
    if types.is_time(kind):
        return pa.time64("ns")
    if is_list(kind):
        return pa.list_(_spark_form(kind.value_type))
    if types.is_struct(kind):
        return pa.struct([(field.name, _spark_form(field.type)) for field in kind])
    if types.is_map(kind):
        return pa.map_(_spark_form(kind.key_type), _spark_form(kind.item_type))
    return kind
