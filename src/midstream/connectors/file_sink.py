"""Files as an exactly-once sink: written under hidden names, renamed when the checkpoint completes."""

from __future__ import annotations

import os
from typing import Literal

import pyarrow as pa
import pyarrow.fs

from midstream.core.config import Size
from midstream.operators.sink import Committer, Sink, SinkWriter, WriterContext


class FileSink(Sink):
    """Every row once, in Parquet or JSON lines files below `directory`.

    `directory`: a local path or a URL that pyarrow knows; with `filesystem`, a path inside it. A
    fresh job needs it to be empty or absent. Files become visible, whole, when the checkpoint that
    covers their rows completes: `part-<checkpoint>-<subtask>-<n>-<unique>.<format>`. `roll_size`: a
    file is ended when it has grown to about this size, and with every checkpoint.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        format: Literal["parquet", "jsonl"] = "parquet",
        roll_size: Size = "128 MiB",
        filesystem: pyarrow.fs.FileSystem | None = None,
    ) -> None:
        raise NotImplementedError

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        raise NotImplementedError

    def writer(self, context: WriterContext) -> SinkWriter:
        raise NotImplementedError

    def committer(self, job_id: str) -> Committer | None:
        raise NotImplementedError
