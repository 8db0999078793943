"""A lakehouse table as a source: its rows as they are, then what is added to it, version by version.

A version (of Iceberg: a snapshot) is a discovery; a data file, or some of its row groups, is a split. The position is
the newest version that was read. What came after it is in the table's own metadata, so a discovery can be repeated.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from functools import partial
from math import inf
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
import pyarrow.fs

from midstream.connectors.files.file_formats import WantedColumns
from midstream.connectors.files.file_source import row_group_runs
from midstream.connectors.files.parquet import earliest_us, parquet_row_groups
from midstream.connectors.files.table_files import TableFile
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.config import Duration, interval_s
from midstream.engine.core.errors import ConfigError, DataError, SchemaError
from midstream.engine.core.schemas import check_schema
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    check_rate,
    decoded,
    rows_text,
)

TableStart: TypeAlias = Literal["latest"] | int | datetime
OnChange: TypeAlias = Literal["fail", "skip"]

_log = logging.getLogger(__name__)
_LARGE_FILE_BYTES: Final = 32 * 2**20
"""Files from this size on are several splits, for which their footers are read."""
_FOOTERS_AT_ONCE: Final = 16
_FILES_PER_DISCOVERY: Final = 10_000
"""A discovery reads no further version once the versions that it has read have added this many files."""


class TableSource(Source):
    """What sources of lakehouse tables share."""

    splits_end = True
    splits_unordered = True
    continues_past_end = True

    def __init__(
        self,
        where: str,
        *,
        columns: Sequence[str] | None,
        watch: bool,
        start: TableStart | None,
        on_change: OnChange,
        interval: Duration,
        rows_per_s: float | None,
    ) -> None:
        name = where.partition(" ")[0]
        check_rate(rows_per_s, name)
        _check_start(start, watch, name)
        if on_change not in ("fail", "skip"):
            raise ConfigError(f"{name}: on_change={on_change!r} is neither 'fail' nor 'skip'")
        if isinstance(columns, str):
            raise ConfigError(f"{name}: columns={columns!r} is a string; give a list: [{columns!r}]")
        self.bounded = not watch
        self.discovery_interval_s = interval_s(interval, "interval")
        self.rows_per_s = rows_per_s
        self._start = start
        self._skips_changes = on_change == "skip"
        self._columns = None if columns is None else tuple(columns)
        self._where = where

    # ---- for subclasses ----

    @abstractmethod
    def _begin(self, event_time: str | None) -> tuple[Sequence[TableFile], bytes]:
        """Return the files that a new job reads first, and the position after them: with `start`, none.

        `event_time`: as in `DiscoveryContext`.
        """

    @abstractmethod
    def _find_start(self) -> None:
        """Raise ConfigError if the table does not have, or no longer has, what a new job with this `start` reads first."""

    @abstractmethod
    def check_resume(self, position: bytes) -> None:
        """Raise ConfigError for a position of another source, or in another table."""

    @abstractmethod
    def _after(self, position: bytes, event_time: str | None) -> Iterator[tuple[Sequence[TableFile], bytes]]:
        """Yield the files that each later version added, and the position after it.

        Raises ConfigError, SchemaError or DataError if this source cannot continue after a version.
        """

    @abstractmethod
    def _stored_field(self, name: str) -> pa.Field[Any] | None:
        """Return a column under its name in the table's files, with its id if the table identifies columns by ids; None if
        files do not have it.
        """

    @abstractmethod
    def _located(self, file: TableFile) -> tuple[pyarrow.fs.FileSystem, str]:
        """Return the filesystem of a file, and its path there."""

    def _columns_to_read(self, names: Sequence[str]) -> list[str]:
        """Return the names of the columns to read, of a table with these. Raises SchemaError for one that it lacks."""
        for name in self._columns or ():
            if name not in names:
                raise SchemaError(f"{self._where}: column {name!r} does not exist; the table has {', '.join(names)}")
        return list(names if self._columns is None else self._columns)

    def _set_schema(self, columns: pa.Schema) -> None:
        check_schema(columns, self._where)
        self.schema = canonical_schema(columns)

    def _skipped(self, where: str) -> None:
        """Handle a version that deletes or changes rows. Raises DataError unless such versions are skipped."""
        if not self._skips_changes:
            raise DataError(
                f"{where} deletes or changes rows, which may have been read; to ignore all that such versions do, read with "
                "on_change='skip'"
            )
        _log.warning("%s deletes or changes rows: skipped", where)

    def _added(self, name: str, where: str) -> SchemaError:
        """Return the error of a column that the table had not when the source was made."""
        return SchemaError(
            f"{where}: column {name!r} was added; start again to read it, or give columns= with those to read, and others "
            "are ignored"
        )

    # ---- on the driver ----

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        """Check `start`, unless the job resumes: it continues from its position, and what was there at `start` may have
        expired since.
        """
        if self._start is not None and not restoring:
            self._find_start()

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        if position is not None:
            self.check_resume(position)
        time = context.event_time
        began, known = self._begin(time) if position is None else ((), position)
        files = [*began]
        for added, after in self._after(known, time) if self._start is not None or position is not None else ():
            files += added
            known = after
            if len(files) >= _FILES_PER_DISCOVERY and not self.bounded:
                break
        files.sort(key=lambda file: -inf if file.min_time_us is None else file.min_time_us)
        return Discovery(tuple(self._splits(files, time)), known, exhausted=self.bounded)

    def _splits(self, files: Sequence[TableFile], event_time: str | None) -> Iterator[Split]:
        field = None if event_time is None else self._stored_field(event_time)
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE, "footers") as pool:
            for parts in pool.map(partial(self._parts, time=field), files):
                for index, part in enumerate(parts):
                    split_id = f"{part.since}:{part.first:06d}:{part.path}"
                    payload = msgspec.msgpack.encode(part)
                    yield Split(split_id, payload, follows=index > 0, min_time_us=part.min_time_us)

    def _parts(self, file: TableFile, time: pa.Field[Any] | None = None) -> list[TableFile]:
        if file.size < _LARGE_FILE_BYTES or file.deleted or file.deletes:
            return [file]
        nothing = WantedColumns(pa.schema([]), declared=True, may_lack_all=True)
        groups = parquet_row_groups(*self._located(file), nothing, time)
        parts = []
        for run in row_group_runs(groups):
            time_us = earliest_us(groups[run.start : run.stop])
            known_us = file.min_time_us if time_us is None else time_us
            parts.append(msgspec.structs.replace(file, first=run.start, last=run.stop, min_time_us=known_us))
        return parts

    # ---- on the subtasks ----

    def place(self, split: Split, first: int, last: int) -> str:
        file = decoded(split.payload, TableFile, type(self).__name__)
        since = f" from row group {file.first} on" if file.first else ""
        which = rows_text(split.offset + first, split.offset + last)
        return f"{self._where}: {file.path} (version {file.since}), {which}{since}, counted from 0"


def _check_start(start: object, watch: bool, where: str) -> None:
    is_version = isinstance(start, int) and not isinstance(start, bool) and start >= 0
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise ConfigError(f"{where}: start={start} has no time zone; give one, for example datetime(…, tzinfo=UTC)")
    elif not (start is None or start == "latest" or is_version):
        raise ConfigError(f"{where}: start={start!r} is no version, 'latest', datetime or None")
    if start == "latest" and not watch:
        raise ConfigError(f"{where}: start='latest' reads what is added from now on, for which watch=True is needed")


def other_column(where: str, name: str, now: str | None) -> ConfigError:
    """Return the refusal of a resume from where another column had this name. `now`: what that one is called now."""
    became = "was dropped" if now is None else f"is called {now!r} now"
    way = f"leave {name!r} out" if now is None else "read it by that name"
    return ConfigError(
        f"{where}: column {name!r} is not the one that the job has read, which {became}: {way} (columns=), or start over with "
        "--fresh"
    )
