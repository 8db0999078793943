"""Key groups: the same on every platform and in every version, or state would not be found again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from midstream.engine.core.key_groups import hash_column, key_group_range, key_groups, subtask_of


@pytest.mark.parametrize(
    ("column", "hashes"),
    [
        (pa.array([0, 1, -1]), [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xE4D971771B652C20]),
        (pa.array([0, 1, -1], pa.int8()), [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0xE4D971771B652C20]),
        (pa.array([False, True]), [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]),
        (pa.array([0, 19_000], pa.date32()), [0xE220A8397B1DCDAF, 0xD27C8B8B04E647F1]),
        (pa.array([0, 1], pa.timestamp("us", "UTC")), [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]),
        (pa.array([0, 1], pa.time64("ns")), [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]),
        (pa.array([0, 1], pa.duration("ms")), [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1]),
        (pa.array(["", "a", "München"]), [0x2D06800538D394C2, 0xE6C632B61E964E1F, 0x4520ED9ECC9E597E]),
        (pa.array([b"\0", b"a"]), [0xC44BDFF4074EECDB, 0xE6C632B61E964E1F]),
    ],
    ids=lambda value: str(value.type) if isinstance(value, pa.Array) else "",
)
def test_hashes_never_change(column: pa.Array[Any], hashes: list[int]) -> None:
    assert hash_column(column).tolist() == hashes


@pytest.mark.parametrize(
    "columns",
    [
        [pa.array([0, 1, 86_399], pa.time32("s")), pa.array([0, 1000, 86_399_000], pa.time32("ms"))],
        [pa.array([0, 1, 86_399], pa.time32("s")), pa.array([0, 10**6, 86_399 * 10**6], pa.time64("us"))],
        [pa.array([0, 1, 86_399], pa.time32("s")), pa.array([0, 10**9, 86_399 * 10**9], pa.time64("ns"))],
        [pa.array([0, -1, 7], pa.duration("s")), pa.array([0, -1000, 7000], pa.duration("ms"))],
        [pa.array([0, -1, 7], pa.timestamp("s", "UTC")), pa.array([0, -1000, 7000], pa.timestamp("ms"))],
        [pa.array([0, -1, 7], pa.date32()), pa.array([0, -1, 7], pa.date32()).cast(pa.date64())],
    ],
    ids=lambda columns: " and ".join(str(column.type) for column in columns),
)
def test_a_value_has_the_hash_of_its_canonical_form(columns: list[pa.Array[Any]]) -> None:
    first, second = columns
    assert hash_column(first).tolist() == hash_column(second).tolist()


@pytest.mark.parametrize(("max_parallelism", "groups"), [(128, [23, 100, 73, 91]), (100, [75, 64, 9, 43])])
def test_key_groups_of_several_columns_never_change(max_parallelism: int, groups: list[int]) -> None:
    batch = pa.RecordBatch.from_pydict({"k": [0, 1, -1, 2**63 - 1], "s": ["a", "b", "c", "d"]})
    assert key_groups(batch, ("k", "s"), max_parallelism).tolist() == groups


def test_a_row_has_the_same_key_group_in_a_batch_of_any_size() -> None:
    batch = pa.RecordBatch.from_pydict({"k": np.arange(100_003), "s": np.arange(100_003) % 7})
    groups = key_groups(batch, ("k", "s"), 128)
    for row in (0, 1, 65_536, 100_002):
        assert key_groups(batch.slice(row, 1), ("k", "s"), 128).tolist() == [groups[row]]
    assert batch.column("k").to_pylist() == list(range(100_003)), "the keys themselves are not touched"


@pytest.mark.parametrize(("parallelism", "max_parallelism"), [(1, 1), (3, 7), (5, 128), (7, 16), (128, 128)])
def test_every_key_group_has_one_owner_and_it_is_the_one_that_claims_it(parallelism: int, max_parallelism: int) -> None:
    owners = subtask_of(np.arange(max_parallelism, dtype=np.int32), parallelism, max_parallelism)
    claimed = [list(key_group_range(subtask, parallelism, max_parallelism)) for subtask in range(parallelism)]
    assert [group for groups in claimed for group in groups] == list(range(max_parallelism))
    assert [owner for owner, groups in enumerate(claimed) for _ in groups] == owners.tolist()
