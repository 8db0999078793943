"""Keyed state with another `max_parallelism`: each row gets its new key group, by the key columns that it has.

Which columns those are is known from the operator's settings, and shown by the rows: their old key groups must follow from
the same columns. State of which this is not so is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from midstream.engine.core.arrow_types import is_struct_array
from midstream.engine.core.batches import single_batch
from midstream.engine.core.errors import ConfigError
from midstream.engine.core.key_groups import key_groups, key_type_supported
from midstream.engine.state.state_parts import KEY_GROUP

Int32s = npt.NDArray[np.int32]
_WATERMARK: Final = "watermark"


def is_progress(table: pa.Table) -> bool:
    """Whether the rows are the watermarks of key groups, which have no keys."""
    return table.column_names == [KEY_GROUP, _WATERMARK]


def progress_of(tables: Sequence[pa.Table], old: int, new: int, where: str) -> pa.Table:
    """Return the watermarks of all new key groups, given those of all old ones.

    Raises ConfigError unless all are equal: a new key group has keys of several old ones.
    """
    table = pa.concat_tables(tables)
    marks = np.unique(table.column(_WATERMARK).to_numpy())
    if table.num_rows != old or len(marks) != 1:
        raise ConfigError(
            f"{where}: its event time has not reached the same point for all keys, so it cannot be divided by another "
            "max_parallelism; make another savepoint a little later, and use that one"
        )
    columns = [pa.array(np.arange(new, dtype=np.int32)), pa.array(np.full(new, marks[0]))]
    return pa.Table.from_arrays(columns, schema=table.schema)


def regrouped(table: pa.Table, keys: Sequence[str], old: int, new: int, where: str) -> pa.Table:
    """Return the same rows with their key groups of `new` instead of `old` ones.

    `keys`: the key columns, or the one that has all of them; none if the state is not keyed. Raises ConfigError if the
    old key groups of the rows do not follow from these.
    """
    batch = single_batch(table)
    arrays = [batch.column(name) for name in keys if batch.schema.names.count(name) == 1]
    if len(arrays) == 1 and is_struct_array(arrays[0]):
        arrays = arrays[0].flatten()
    is_known = len(arrays) >= len(keys) and all(
        key_type_supported(each.type) and not each.null_count for each in arrays
    )
    groups = batch.column(KEY_GROUP).to_numpy(zero_copy_only=False)
    if not is_known or not np.array_equal(_groups(arrays, batch.num_rows, old), groups):
        raise ConfigError(
            f"{where}: the key groups of its rows do not follow from the columns {', '.join(keys) or 'of any key'}, so it cannot "
            "be divided by another max_parallelism; drop the operator (drop=[uid]), which then begins without state, or keep "
            "max_parallelism"
        )
    index = batch.schema.get_field_index(KEY_GROUP)
    found = pa.array(_groups(arrays, batch.num_rows, new))
    return pa.Table.from_batches([batch]).set_column(index, batch.schema.field(index), found)


def _groups(keys: Sequence[pa.Array[Any]], rows: int, max_parallelism: int) -> Int32s:
    if not keys:  # state that is not keyed is in the first key group
        return np.zeros(rows, np.int32)
    names = tuple(map(str, range(len(keys))))
    return key_groups(pa.RecordBatch.from_arrays(list(keys), list(names)), names, max_parallelism)
