"""A checkpoint that each released version has left in `tests/released` is restored, or refused by its format."""

from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from midstream import Environment, StorageError, testing
from midstream.engine.checkpoint.metadata import VERSION, WITH_DELETIONS
from midstream.runtime.process.process_slots import ProcessSlots
from released_job import (
    FOLDER,
    NAME,
    OF_SPLIT,
    SPLITS,
    environment,
    first_rows,
    metadata_in,
    missing,
    other_rows,
    program,
)

RELEASED = sorted(FOLDER.glob("*.zip"))


def test_there_is_one() -> None:
    assert RELEASED


@pytest.mark.parametrize("archive", RELEASED, ids=[path.stem for path in RELEASED])
def test_what_a_release_has_stored_is_restored_or_refused_by_its_format(archive: Path, tmp_path: Path) -> None:
    before, now = tmp_path / "before", tmp_path / "now"
    with zipfile.ZipFile(archive) as stored:
        stored.extractall(before)
    (path,) = before.glob("state/chk-*/_metadata")
    (format_then,) = struct.unpack_from("<I", path.read_bytes(), 8)
    if format_then not in (VERSION, WITH_DELETIONS):
        with pytest.raises(StorageError, match=f"written in format {format_then} by another version"):
            metadata_in(before)
        return
    assert missing(metadata_in(before)) == []
    (before / ".out.midstream").rename(tmp_path / ".out.midstream")
    env = environment(now, parallelism=3)
    program(env).write_jsonl(tmp_path / "out").uid("out")
    env.execute(slots=ProcessSlots(), restore_from=str(before / "state"))
    rows, others = first_rows(np.arange(SPLITS * OF_SPLIT)), other_rows(np.arange(OF_SPLIT))
    given = {"rows": rows.sort("at", maintain_order=True), "others": others}
    expected = testing.run(program(Environment(NAME)), given).rows
    found = pl.concat(map(pl.read_ndjson, sorted((tmp_path / "out").glob("*.jsonl"))))
    assert sorted(map(str, found.to_dicts())) == sorted(map(str, expected))
