"""Files as a source: Parquet, CSV, JSON lines; bounded, or a directory that is watched.

| | a split is | offset |
|---|---|---|
| Parquet | a run of row groups; the whole file if it is small, which is opened to find splits only for its event times | rows from its start; row groups before it are not read |
| CSV, JSON lines | lines that begin in a range of bytes; the whole file if it is compressed | see `text` |

A split records its file's size and modification time: a file that has changed since is refused, since the offset counts
other rows. Both are checked when a split is opened and before the last of its rows are emitted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from math import inf
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs
import xxhash

from midstream.connectors.common.batch_cursor import BatchCursor
from midstream.connectors.common.dataset_uris import file_uri
from midstream.connectors.common.filesystem import appears_whole, file_info, find_files, glob_base, resolve
from midstream.connectors.common.malformed_records import BadRecordsMax, OnBadRecord, check_on_bad_record
from midstream.connectors.files.csv_jsonl import TextReader, block_and_rows, infer_schema, read_header
from midstream.connectors.files.directory_watch import DirectoryWatch, Listing, decoded_position
from midstream.connectors.files.file_formats import Format, WantedColumns, compression_of, explained, format_of
from midstream.connectors.files.folder_columns import FolderColumnsReader, folder_values, parsed_values, without
from midstream.connectors.files.parquet import RowGroup, earliest_us, open_parquet, parquet_row_groups, read_parquet
from midstream.connectors.files.text_file import TextFile
from midstream.connectors.files.text_parsers import CsvOptions, check_types
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.config import Duration, interval_s
from midstream.engine.core.errors import ConfigError, DataError, SchemaError, StorageError
from midstream.engine.core.schemas import check_schema
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    check_rate,
    decoded,
    rows_text,
)

__all__ = ["CsvOptions", "FileSource", "Format"]

_log = logging.getLogger(__name__)
_SPLIT_BYTES_MIN = 4 * 2**20
"""Row groups smaller than this are read together, and so is all of a smaller file."""
_TEXT_SPLIT_BYTES = 16 * 2**20
_READ_ONCE = b"files read once"
"""With this begins the position of a source that does not watch."""
_TIMED_FILES_MAX = 10_000
"""The number of new files up to which the earliest event time of each is read from its footer. The job reads no row
before it has read the footers, and each takes a request."""
_FOOTERS_AT_ONCE = 16
"""The number of large Parquet files whose footers are read concurrently; reading one mostly waits for a network."""


class FileSplit(msgspec.Struct, frozen=True, array_like=True):
    path: str
    size: int
    modified_ns: int
    first: int = 0
    last: int = -1
    """The end of the row groups, or of the bytes at which lines begin: `first` up to, not including, `last` (-1: the
    end).
    """


class FileSource(Source):
    """Reads files of one format: Parquet, CSV or JSON lines.

    Below a directory, names that begin with `.` or `_` or end in .tmp or .part are ignored: write a file under such a
    name, then rename it. Afterwards a file must not change; one that does is an error.

    The arguments are those of `Environment.read_files`.

    Raises ConfigError (no file, unknown format), StorageError (unreadable or incomplete file) or SchemaError (files
    disagree): for the first file immediately, for others when they are found or read.

        >>> from midstream.connectors import FileSource
        >>> pl.DataFrame({"n": [1, 2]}).write_parquet("numbers.parquet")
        >>> FileSource("*.parquet").schema.names
        ['n']
    """

    splits_end = True
    continues_past_end = True

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        format: Format | None = None,
        schema: pa.Schema | None = None,
        watch: bool = False,
        interval: Duration = "1 s",
        csv: CsvOptions | None = None,
        on_bad_record: OnBadRecord = "fail",
        bad_records_max: BadRecordsMax | None = None,
        filesystem: pyarrow.fs.FileSystem | None = None,
        rows_per_s: float | None = None,
    ) -> None:
        if format not in (None, "parquet", "csv", "jsonl"):
            raise ConfigError(f"FileSource: format {format!r} is not one of parquet, csv, jsonl")
        check_rate(rows_per_s, "FileSource")
        check_on_bad_record(on_bad_record, bad_records_max, "FileSource")
        self.drops_bad_records, self.bad_records_max = on_bad_record == "drop", bad_records_max
        given = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        resolved = _resolved(given, filesystem)
        self.bounded = not watch
        self._interval_s = self.discovery_interval_s = interval_s(interval, "interval")
        self.rows_per_s = rows_per_s
        self._filesystem = resolved[0][0]
        self._paths = [inner for _, inner in resolved]
        self._datasets = [
            file_uri(each, found, glob_base(inner)) for each, (found, inner) in zip(given, resolved, strict=True)
        ]
        self._csv = csv or CsvOptions()
        self._watch: DirectoryWatch | None = None
        self._roots = [glob_base(path) for path in self._paths]
        self._folders: tuple[str, ...] | None = None
        """The columns that the folders of each file must have; None if columns are declared."""
        declared = schema is not None
        files = self._find()
        self._format: Format = format or self._infer_format(files)
        self.supports_projection = self.splits_unordered = self._format == "parquet"
        if schema is None:
            schema = self._infer_schema(files)
            self._folders = tuple(folder_values(self._first(files).path, self._roots))
            more = [name for name in self._folders if name not in schema.names]
            schema = pa.schema([*schema, *(pa.field(name, pa.large_string()) for name in more)])
        check_schema(schema, "FileSource: the declared schema" if declared else "FileSource: the first file")
        self.schema = canonical_schema(schema)
        required = tuple(field.name for field in schema if declared and not field.nullable)
        in_seconds = canonical_schema(schema, keeps_seconds=True) if declared else None
        self._wanted = WantedColumns(self.schema, declared, required, in_seconds)
        if self._format == "parquet" and self.drops_bad_records:
            raise ConfigError(
                "FileSource: on_bad_record='drop' is for CSV and JSON lines; a damaged Parquet file cannot be read "
                "record by record"
            )
        if self._format != "parquet":
            check_types(self._wanted.in_text, self._format, self._csv)
        if declared:
            self._check_some_have(files)
        if files:
            first = self._first(files).path
            parsed_values(self._values_in_folders(first), self._wanted, first)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watch": None}  # only the driver uses it

    # ---- on the driver ----

    def datasets(self) -> Sequence[str]:
        return self._datasets

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        if position is not None:
            self.check_resume(position)
        if self.bounded and (position is None or position.startswith(_READ_ONCE)):
            splits = tuple(self._splits(self._find(), 0, context.event_time)) if position is None else ()
            return Discovery(splits, position or self._read_once(), exhausted=True)
        began_s = time.thread_time()
        known = decoded_position(position, "FileSource")
        if self._watch is None:
            self._watch = DirectoryWatch(self.bounded or appears_whole(self._filesystem))
        # an empty file may be one whose writer has just begun
        listing = Listing.of([info for info in self._find() if info.size])
        new, after = self._watch.poll(listing, known, now_ns=time.time_ns(), now_s=time.monotonic())
        splits = tuple(self._splits(new, known.files, context.event_time))
        # Listing runs in parallel to the driver's loop; it may take at most a tenth of the time.
        self.discovery_interval_s = max(self._interval_s, 9 * (time.thread_time() - began_s))
        return Discovery(splits, after.encoded(), exhausted=self.bounded)

    def check_resume(self, position: bytes) -> None:
        """Raise ConfigError for a position of another source or in other files, and if files read once are watched now."""
        if not position.startswith(_READ_ONCE):
            decoded_position(position, "FileSource")
            return
        if not self.bounded:
            raise ConfigError(
                "FileSource: the checkpoint is of a job that read the files once, and does not have their names, so watch=True "
                "would read them again; start with --fresh, or give the source a new uid"
            )
        then, now = (each.removeprefix(_READ_ONCE)[2:].decode() for each in (position, self._read_once()))
        if then not in ("", now):
            raise ConfigError(
                f"FileSource: the checkpoint is of a job that read {then}, and now the source has {now}, which would "
                "not be read; resume with the paths of the checkpoint, or start over with --fresh"
            )

    def _read_once(self) -> bytes:
        """Return the position of a source that does not watch, which is after all files of its paths."""
        paths = sorted(set(self._paths))
        more = f" and {len(paths) - 1} more paths" if len(paths) > 1 else ""
        return _READ_ONCE + f": {paths[0]}{more} ({xxhash.xxh3_64_hexdigest(chr(10).join(paths).encode())})".encode()

    def _find(self) -> list[Any]:
        """Return the files that exist, in the order in which they were requested; each once."""
        found: dict[str, Any] = {}
        for path in self._paths:
            infos = find_files(self._filesystem, path)
            if not infos and self.bounded:
                raise ConfigError(f"FileSource: {_nothing(self._filesystem, path)}")
            if not infos and file_info(self._filesystem, glob_base(path)).type == pyarrow.fs.FileType.NotFound:
                raise ConfigError(
                    f"FileSource: the directory {glob_base(path)} to watch does not exist; create it first"
                )
            found.update((info.path, info) for info in infos)
        return list(found.values())

    def _infer_format(self, files: list[Any]) -> Format:
        first: Format | None = None
        for info in files:
            found = format_of(info.path)
            if found is None:
                raise ConfigError(
                    f"FileSource: the name of {info.path} does not show its format; give format=, or a glob that "
                    "excludes the file"
                )
            if first is not None and found != first:
                raise ConfigError(
                    f"FileSource: {info.path} is {found}, but files before it are {first}; read one format with a "
                    f"glob such as *.{first}"
                )
            first = found
        if first is None:
            raise ConfigError(f"FileSource: {', '.join(self._paths)} is empty; give format= (and schema=) to watch it")
        return first

    def _first(self, files: list[Any]) -> Any:
        return next((info for info in files if info.size), files[0])

    def _values_in_folders(self, path: str) -> dict[str, str | None]:
        """Return the columns of the source that only the names of a file's folders have, and their values. Lines of JSON have
        the columns that the first ones have.
        """
        found = folder_values(path, self._roots)
        if self._folders is not None and set(found) != set(self._folders):
            raise SchemaError(
                f"{path}: its folders have values of the columns ({', '.join(sorted(found))}), and those of the first file of "
                f"({', '.join(sorted(self._folders))}); declare schema="
            )
        read = {name: value for name, value in found.items() if name in self.schema.names}
        is_named = self._format != "csv" or self._csv.header
        try:
            own = self._names_in(path) if read and is_named else []
        except (DataError, SchemaError):
            own = []  # its reader reports it, or drops bad lines
        return {name: value for name, value in read.items() if name not in own}

    def _infer_schema(self, files: list[Any]) -> pa.Schema:
        if self._format == "csv" and not self._csv.header:
            raise ConfigError("FileSource: CSV without a header needs schema= to name its columns")
        if not files:
            raise ConfigError(f"FileSource: {', '.join(self._paths)} is empty; give schema= to watch it")
        first = self._first(files)
        if self._format != "parquet":
            schemas = (
                infer_schema(self._filesystem, info.path, self._format, self._csv) for info in files if info.size
            )
            found = next(filter(len, schemas), None)  # one that is compressed may be empty, too
            if found is None:
                raise SchemaError(f"{first.path}: empty; its columns cannot be inferred: declare schema=")
            return found
        with explained(first.path, "parquet"), ExitStack() as stack:
            return open_parquet(self._filesystem, first.path, stack).schema_arrow

    def _check_some_have(self, files: list[Any]) -> None:
        """Raise SchemaError for a declared column that neither the first nor the last file has: it may be misspelt.

        Of JSON lines the first ones are read, and the column is only warned of, since a later line may have it.
        """
        some = [info for info in files if info.size]
        if not some or (self._format == "csv" and not self._csv.header):
            return
        names: list[str] = []
        try:
            for info in {id(info): info for info in (some[0], some[-1])}.values():
                names += [*self._names_in(info.path), *folder_values(info.path, self._roots)]
        except (StorageError, SchemaError):
            return  # its reader reports it
        if not names:
            return  # they are empty
        missing = [name for name in self.schema.names if name not in names]
        if not missing:
            return
        found = ", ".join(dict.fromkeys(names))
        ends = list(dict.fromkeys((some[0].path, some[-1].path)))
        where = " and ".join(ends) + (", the first and the last file" if len(ends) > 1 else "")
        if self._format == "jsonl":
            _log.warning(
                "FileSource: declared columns that are in no line at the beginning of %s, where lines have %s: %s; if a name is "
                "misspelt, all its values are null",
                *(where, found, ", ".join(map(repr, missing))),
            )
            return
        raise SchemaError(
            f"FileSource: declared column {missing[0]!r} is missing from {where}; there are {found}. Leave it out of schema= "
            "until files have it"
        )

    def _names_in(self, path: str) -> list[str]:
        with explained(path, self._format), ExitStack() as stack:
            if self._format == "parquet":
                return list(open_parquet(self._filesystem, path, stack).schema_arrow.names)
            if self._format == "jsonl":
                return list(infer_schema(self._filesystem, path, self._format, self._csv).names)
            return read_header(TextFile(self._filesystem, path), self._csv, self.schema)[0]

    def _splits(self, files: list[Any], files_before: int, event_time: str | None) -> Iterator[Split]:
        """Yield the splits of files, those with the earliest event times first, as far as these are known."""
        found = enumerate(zip(files, self._parts_of(files, event_time), strict=True), files_before)
        by_time = sorted(found, key=lambda each: min((-inf if at is None else at for _, at in each[1][1]), default=inf))
        for number, (info, parts) in by_time:
            for index, (part, min_time_us) in enumerate(parts):
                split_id = f"{number:08d}:{part.first:012d}:{info.path}"
                yield Split(split_id, msgspec.msgpack.encode(part), follows=index > 0, min_time_us=min_time_us)

    def _parts_of(self, files: list[Any], event_time: str | None) -> Iterator[list[tuple[FileSplit, int | None]]]:
        """Yield the splits of each file, with their earliest event time."""
        if self._format != "parquet":
            yield from map(self._text_parts, files)
            return
        time = None if event_time is None else self.schema.field(event_time)
        opens_all = time is not None and len(files) <= _TIMED_FILES_MAX
        with ThreadPoolExecutor(_FOOTERS_AT_ONCE, "footers") as pool:
            opened = [info for info in files if opens_all or info.size >= _SPLIT_BYTES_MIN]
            parts = pool.map(partial(self._parquet_parts, time=time), opened)
            for info in files:
                yield next(parts) if opens_all or info.size >= _SPLIT_BYTES_MIN else [(_whole(info), None)]

    def _parquet_parts(self, info: Any, time: pa.Field[Any] | None) -> list[tuple[FileSplit, int | None]]:
        whole = _whole(info)
        if info.size < _SPLIT_BYTES_MIN:  # its columns are checked when it is read
            nothing = WantedColumns(pa.schema([]), declared=True, may_lack_all=True)
            return [(whole, earliest_us(parquet_row_groups(self._filesystem, info.path, nothing, time)))]
        wanted = without(self._wanted, self._values_in_folders(info.path), info.path)
        groups = parquet_row_groups(self._filesystem, info.path, wanted, time)
        return [
            (msgspec.structs.replace(whole, first=run.start, last=run.stop), earliest_us(groups[run.start : run.stop]))
            for run in row_group_runs(groups)
        ]

    def _text_parts(self, info: Any) -> list[tuple[FileSplit, int | None]]:
        if compression_of(info.path) is not None or (self._format == "csv" and self._csv.newlines_in_values):
            return [(_whole(info), None)]
        firsts = range(0, info.size, _TEXT_SPLIT_BYTES)
        lasts = [*firsts[1:], -1]
        whole = _whole(info)
        return [
            (msgspec.structs.replace(whole, first=first, last=last), None)
            for first, last in zip(firsts, lasts, strict=False)
        ]

    # ---- on the subtasks ----

    def open_split(self, split: Split) -> SplitReader:
        return self.open_projected(split, self.schema)

    def open_projected(self, split: Split, columns: pa.Schema) -> SplitReader:
        part = decoded(split.payload, FileSplit, "FileSource")
        if folder_values(part.path, self._roots):
            check_unchanged(self._filesystem, part, split.offset)  # before its columns are looked for
        values = self._values_in_folders(part.path)
        if not values:
            return self._opened(part, self._wanted, split.offset, columns.names)
        parsed = parsed_values(values, self._wanted, part.path)
        wanted = without(self._wanted, values, part.path)
        in_file = [name for name in columns.names if name not in values]
        reader = self._opened(part, wanted, split.offset, in_file)
        return FolderColumnsReader(reader, columns, parsed)

    def _opened(self, part: FileSplit, wanted: WantedColumns, offset: int, columns: Sequence[str]) -> SplitReader:
        check_unchanged(self._filesystem, part, offset)
        if self._format == "parquet":
            return open_row_groups(self._filesystem, part, wanted, offset, columns)
        return TextReader(
            self._filesystem,
            part.path,
            self._format,
            wanted,
            csv=self._csv,
            check=partial(check_unchanged, self._filesystem, part, offset),
            first=part.first,
            last=part.last if part.last >= 0 else None,
            offset=offset,
            drops_bad_lines=self.drops_bad_records,
        )

    def place(self, split: Split, first: int, last: int) -> str:
        part = decoded(split.payload, FileSplit, "FileSource")
        if self._format == "parquet":
            return row_group_place(part, split.offset, first, last)
        start, done = block_and_rows(split.offset)
        rows = f"{part.path}, {rows_text(done + first, done + last)} from"
        if start or not part.first:
            headed = not start and self._format == "csv" and self._csv.header
            return f"{rows} byte {start} on, counted from 0{' after the header' if headed else ''}"
        return f"{rows} the first line that begins at byte {part.first} or later, counted from 0"


def _resolved(
    paths: Sequence[str | os.PathLike[str]], filesystem: pyarrow.fs.FileSystem | None
) -> list[tuple[pyarrow.fs.FileSystem, str]]:
    """Return the filesystem of each path, and the path in it. Raises ConfigError."""
    if not paths:
        raise ConfigError("FileSource: an empty list of paths")
    found = [resolve(each, filesystem, "FileSource") for each in paths]
    if any(not each.equals(found[0][0]) for each, _ in found):
        raise ConfigError(
            "FileSource: the paths are on different filesystems; make one source for each and union() them"
        )
    return found


def row_group_place(part: FileSplit, offset_rows: int, first: int, last: int) -> str:
    """Describe the place of rows of a split of a Parquet file, for `Source.place`."""
    since = f" from row group {part.first} on" if part.first else ""
    return f"{part.path}, {rows_text(offset_rows + first, offset_rows + last)}{since}, counted from 0"


def check_unchanged(filesystem: pyarrow.fs.FileSystem, part: FileSplit, offset: int = 0) -> None:
    """Raise DataError if the file of a split, read up to `offset`, has changed, StorageError if it is missing."""
    info = file_info(filesystem, part.path)
    if info.type != pyarrow.fs.FileType.File:
        raise StorageError(
            f"{part.path}: the file has disappeared since it was found; reading was to resume at offset {offset} of "
            f"this part (remaining: {_left(filesystem, part.path)}). A source's files must stay until they are read: restore "
            "it, or start without it and with --fresh"
        )
    if (info.size, _modified_ns(info)) != (part.size, part.modified_ns):
        raise DataError(
            f"{part.path}: has changed since it was found ({part.size} bytes then, {info.size} now); restore it as it was, "
            "or start with --fresh. Write files under a name that begins with '.' or ends in .tmp, and rename them when "
            "they are complete"
        )


def open_row_groups(
    filesystem: pyarrow.fs.FileSystem,
    part: FileSplit,
    wanted: WantedColumns,
    offset_rows: int,
    columns: Sequence[str] | None = None,
) -> SplitReader:
    """Open a reader of a split of a Parquet file. `columns`: as for `read_parquet`."""
    check = partial(check_unchanged, filesystem, part, offset_rows)
    last = part.last if part.last >= 0 else None
    with ExitStack() as stack:
        batches, skip_rows = read_parquet(
            filesystem, part.path, wanted, part.first, last, offset_rows, columns=columns, check=check, stack=stack
        )
        close = stack.pop_all().close
    return BatchCursor(batches, where=part.path, offset_rows=offset_rows, skip_rows=skip_rows, on_close=close)


def row_group_runs(groups: Sequence[RowGroup]) -> Iterator[range]:
    """Yield runs of consecutive row groups with at least `_SPLIT_BYTES_MIN` together; empty ones are added to others."""
    start = size = rows = 0
    for index, group in enumerate(groups):
        rows += group.rows
        size += group.bytes
        if rows and (size >= _SPLIT_BYTES_MIN or index + 1 == len(groups)):
            yield range(start, index + 1)
            start, size, rows = index + 1, 0, 0


def _whole(info: Any) -> FileSplit:
    return FileSplit(info.path, info.size, _modified_ns(info))


def _modified_ns(info: Any) -> int:
    return int(info.mtime_ns or 0)


def _nothing(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    if glob_base(path) != path:
        return f"no file matches {path}"
    if file_info(filesystem, path).type == pyarrow.fs.FileType.Directory:
        return (
            f"there is no file to read in {path} (names that begin with '.' or '_' or end in .tmp or .part are ignored)"
        )
    return f"there is no file {path}"


def _left(filesystem: pyarrow.fs.FileSystem, path: str) -> str:
    """Describe what exists next to a missing file, for its message."""
    directory = path.rpartition("/")[0]
    selector = pyarrow.fs.FileSelector(directory, allow_not_found=True)
    names = sorted(info.base_name for info in filesystem.get_file_info(selector))
    return f"{len(names)} files in {directory}, {names[0]} to {names[-1]}" if names else f"nothing in {directory}"
