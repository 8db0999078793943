"""A join of a simulated job with a table of which each load is another version, and the checks of what it emits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import pyarrow as pa

from midstream.engine.core.errors import StorageError
from midstream.engine.operators import table_join
from midstream.engine.operators.base import OperatorContext, Output, Snapshot
from midstream.engine.operators.table_join import TABLE, TableJoinOperator
from midstream.engine.state.state_parts import StatePart
from midstream.simulation.network import SIM
from midstream_lab.jobs.recorded_rows import SCHEMA, Outside
from midstream_lab.jobs.wrapped_operator import Around

_REFRESH_S: Final = 0.05
_KEYS: Final = 4_000
_MISSING: Final = 5
"""The table lacks the keys that are divisible by this, and those from `_KEYS` on."""
_FAILS: Final = 4
"""Each load whose number is divisible by this fails, unless it is the first of its operator."""
_COLUMNS: Final = pa.schema([("id", pa.int64()), ("version", pa.int64()), ("value", pa.int64())])

logging.getLogger(table_join.__name__).setLevel(logging.ERROR)  # simulated loads fail by design


class Versions:
    """Loads version 1, 2, … of a table: all operators that share a uid count together."""

    text = "versions"

    def __init__(self, uid: str, outside: Outside) -> None:
        self._uid = uid
        self._outside = outside
        self._has_loaded = False

    def load(self) -> pa.Table:
        self._outside.world.io_point()
        version = self._outside.table_loads[self._uid] = self._outside.table_loads.get(self._uid, 0) + 1
        if self._has_loaded and version % _FAILS == 0:
            raise StorageError(f"the table cannot be read now {SIM}")
        self._outside.world.io_point()
        self._has_loaded = True
        ids = np.array([key for key in range(_KEYS) if key % _MISSING], np.int64)
        return pa.table([ids, np.full(len(ids), version), ids * 1_000 + version], schema=_COLUMNS)


class Enrich(Around):
    """Joins each row with such a table by a part of its id, and passes it on as it was.

    It checks that all columns come from one version, that versions never go back, that a checkpoint has the version with
    which the rows before it were joined, and that a restore continues with that version until the next is due.
    """

    keeps_splits = True
    keeps_rows = True

    def __init__(self, uid: str, outside: Outside) -> None:
        self._given = uid, outside
        self._uid = uid
        columns = pa.schema([*SCHEMA, ("short", pa.int64())])
        loader = Versions(uid, outside)
        super().__init__(
            outside, TableJoinOperator(uid, columns, loader, _COLUMNS, (["short"], ["id"]), "left", _REFRESH_S)
        )
        self._version = 0
        """The version of the last row that had a partner, or of the restore."""
        self._same_until_ms = 0
        """Until when the version of the restore must be used."""
        self._out: Output
        self._context: OperatorContext

    def __reduce__(self) -> tuple[type[Enrich], tuple[str, Outside]]:
        return Enrich, self._given

    def open(self, context: OperatorContext, out: Output) -> None:
        self._context, self._out = context, out
        super().open(context, self)  # type: ignore[arg-type]  # only what the inner operator calls

    def ready(self, wake: Callable[[], None]) -> bool:
        return self._inner.ready(wake)

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        [chunk] = parts[TABLE].chunks
        self._version = _version(chunk.table)
        if self._outside.table_versions.get(chunk.id) != self._version:
            self._bug(f"chunk {chunk.id} is restored as version {self._version}, and is {self._outside.table_versions}")
        now_ms, loaded_ms = self._context.clock.now_ms(), int(chunk.id[:15])
        self._same_until_ms = min(now_ms, loaded_ms) + round(_REFRESH_S * 1000)
        super().restore(parts)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        short = pa.array(batch.column("id").to_numpy() % (_KEYS + 50))
        super().process(batch.append_column("short", short), port)

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        """Check the rows of a batch, and emit them as they came."""
        rows = zip(*(batch.column(name).to_pylist() for name in ("short", "version", "value")), strict=True)
        seen = set()
        for short, version, value in rows:
            is_there = short < _KEYS and short % _MISSING != 0
            if is_there != (version is not None) or (is_there and value != short * 1_000 + version):
                self._bug(f"key {short} is joined with version {version} and value {value}")
            if version is not None:
                seen.add(version)
        if len(seen) > 1 or any(version < self._version for version in seen):
            self._bug(f"rows are joined with the versions {sorted(seen)} after {self._version}")
        if seen:
            [version] = seen
            if version != self._version and self._context.clock.now_ms() < self._same_until_ms:
                self._bug(f"version {version} replaces {self._version} before it is due")
            self._version = version
        self._out.emit(batch.select(SCHEMA.names))

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        snapshot = super().snapshot(checkpoint_id)
        parts = snapshot.complete().parts
        version = 0
        if TABLE in parts:
            [chunk] = parts[TABLE].chunks
            version = _version(chunk.table)
            if self._outside.table_versions.setdefault(chunk.id, version) != version:
                self._bug(f"chunk {chunk.id} has two versions, {version} and {self._outside.table_versions[chunk.id]}")
        if version < self._version:
            self._bug(f"checkpoint {checkpoint_id} has version {version}; rows before it had {self._version}")
        return snapshot

    def _bug(self, what: str) -> None:
        self._outside.world.bug(f"{self._uid}/{self._context.subtask}: {what}")


def _version(table: pa.Table) -> int:
    return int(table.column("version")[0].as_py())
