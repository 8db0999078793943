"""Keys that have one hash, which 64 bits almost never give: nothing is found or removed that has another key."""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from random import Random
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest

from midstream.engine.state import join_index, session_index, table_runs
from midstream.engine.state.session_index import SessionIndex
from midstream.engine.state.table_runs import among, hashes_of
from midstream.engine.state.table_state import TableState
from midstream.engine.state.tombstones import UInt64s

REAL = hashes_of


def _coarse(keys: pl.DataFrame) -> UInt64s:
    """Three hashes for all keys."""
    return REAL(keys) % np.uint64(3)


@pytest.fixture
def _few_hashes() -> Iterator[None]:
    with (
        patch.object(table_runs, "hashes_of", _coarse),
        patch.object(session_index, "hashes_of", _coarse),
        patch.object(join_index, "hashes_of", _coarse),
    ):
        yield


def _keys(random: Random, count: int) -> pl.DataFrame:
    return pl.DataFrame(
        {"a": [random.choice("abcdef") for _ in range(count)], "b": [random.randrange(3) for _ in range(count)]}
    )


def test_hashes_do_not_depend_on_the_rows_beside_them_and_tell_columns_apart() -> None:
    keys = pl.DataFrame({"a": [1, 2, 1, 2], "b": [2, 1, 1, 2]})
    whole = hashes_of(keys)
    assert [hashes_of(keys[row : row + 1])[0] for row in range(4)] == whole.tolist()
    assert len(set(whole.tolist())) == 4


@pytest.mark.usefixtures("_few_hashes")
@pytest.mark.parametrize("seed", range(20))
def test_rows_of_other_keys_are_not_among_them(seed: int) -> None:
    random = Random(seed)
    rows, keys = _keys(random, random.randrange(1, 20)), _keys(random, random.randrange(1, 8))
    wanted = set(keys.rows())
    assert among(rows, keys).tolist() == [number for number, row in enumerate(rows.rows()) if row in wanted]


@pytest.mark.usefixtures("_few_hashes")
@pytest.mark.parametrize("seed", range(20))
def test_a_table_returns_and_removes_the_rows_of_the_keys_alone(seed: int) -> None:
    random = Random(seed)
    table = TableState({"a": str, "b": int, "n": int}).bound("held", ["a", "b"], range(16), 16)
    held: list[tuple[str, int, int]] = []
    for number in range(30):
        keys = _keys(random, random.randrange(1, 6)).unique(maintain_order=True)
        wanted = set(keys.rows())
        assert sorted(table.lookup(keys).rows()) == sorted(row for row in held if row[:2] in wanted)
        if number % 3:
            table.upsert(keys.with_columns(n=pl.lit(number)))
            held = [row for row in held if row[:2] not in wanted] + [(*key, number) for key in keys.rows()]
        else:
            assert sorted(table.pop(keys).rows()) == sorted(row for row in held if row[:2] in wanted)
            held = [row for row in held if row[:2] not in wanted]
        assert sorted(table.frame.rows()) == sorted(held)


@pytest.mark.usefixtures("_few_hashes")
@pytest.mark.parametrize("rows_max", [4, 1_000])
@pytest.mark.parametrize("seed", range(10))
def test_an_index_of_sessions_takes_the_parts_of_the_keys_alone(seed: int, rows_max: int) -> None:
    random = Random(seed)
    index = SessionIndex(["a", "b"], "end", pl.concat)
    held: list[tuple[str, int, int]] = []
    with patch.object(session_index, "RUN_ROWS", rows_max), patch.object(session_index, "RUNS_MAX", 2):
        for number in range(30):
            parts = _keys(random, random.randrange(1, 6)).with_columns(end=pl.lit(number, pl.Int64))
            index.append(parts)
            index.compact()
            held += parts.rows()
            keys = _keys(random, 2).unique(maintain_order=True)
            wanted = set(keys.rows())
            taken = index.take(keys)
            by_key = sorted([] if taken is None else taken.rows(), key=itemgetter(0, 1))  # keys are in no order
            assert by_key == sorted((row for row in held if row[:2] in wanted), key=itemgetter(0, 1))
            held = [row for row in held if row[:2] not in wanted]
