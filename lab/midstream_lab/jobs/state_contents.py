"""The combined contents of the chunks of a process function's state, read without the engine's own reader."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream_lab.jobs.key_types import stored_keys

_KINDS: Final = ("value:", "list:", "map:", "reducing:", "broadcast:", "timers:")


def newest(part: str, tables: Sequence[pa.Table]) -> Iterator[pa.Table]:
    """Yield the tables of a part, oldest first; those of process functions without the rows that newer ones replace."""
    if not part.startswith(_KINDS):
        yield from tables
        return
    seen: set[Any] = set()
    found = []
    for table in reversed(tables):
        owners = _owners(table)
        gone = to_list(table.column("gone")) if "gone" in table.column_names else [False] * table.num_rows
        counts = [owner not in seen and not is_gone for owner, is_gone in zip(owners, gone, strict=True)]
        seen.update(owners)
        if any(counts):
            rows = table.filter(pa.array(counts))
            found.append(rows.drop_columns(["gone"]) if "gone" in rows.column_names else rows)
    yield from reversed(found)


def _owners(table: pa.Table) -> list[Any]:
    """Return the identity of each row, by which newer tables replace it: its key or, for a timer, its time and key."""
    keys = stored_keys(table.column("key")) if "key" in table.column_names else [None] * table.num_rows
    return list(zip(to_list(table.column("time_us")), keys, strict=True)) if "time_us" in table.column_names else keys
