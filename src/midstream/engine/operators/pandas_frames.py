"""Batches as pandas DataFrames and back, without a change of any value.

Columns have pandas' types of Arrow (`int64[pyarrow]`). With numpy's types, integers would become floats in those batches
that have a null, so a column's type would depend on where batches are cut.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pyarrow as pa

from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.core.python_values import ValueMisfit, kind_of, to_array


def require_pandas(where: str) -> None:
    if find_spec("pandas") is None:
        raise JobError(f"{where}: form='pandas' needs pandas, which is not installed here; install pandas 2.2 or newer")


def to_pandas(batch: pa.RecordBatch) -> Any:
    """Return a DataFrame in which each column has the Arrow type that it has in the batch."""
    from pandas import ArrowDtype

    return batch.to_pandas(types_mapper=ArrowDtype, ignore_metadata=True)


def is_pandas(made: object) -> bool:
    kind = type(made)
    return kind.__name__ == "DataFrame" and kind.__module__.partition(".")[0] == "pandas"


def from_pandas(frame: Any, schema: pa.Schema, where: str) -> pa.Table:
    """Return a table of the frame's columns, which `schema` is to have; the index is left out.

    Raises SchemaError naming `where` and the first column that does not fit.
    """
    names = list(frame.columns)
    for name in names:
        if not isinstance(name, str):
            raise SchemaError(
                f"{where}: column {name!r} of the pandas frame is named by {kind_of(name)}; name it by a str"
            )
        if names.count(name) > 1:
            raise SchemaError(f"{where}: the pandas frame has two columns {name!r}; rename one")
    for name in schema.names:
        if name not in names and name in frame.index.names:
            raise SchemaError(
                f"{where}: column {name!r} is the index of the pandas frame, which is left out; call reset_index()"
            )
    columns = []
    for name in names:
        index = schema.get_field_index(name)
        columns.append(_column(frame[name], None if index < 0 else schema.field(index), f"{where}: column {name!r}"))
    return pa.Table.from_arrays(columns, names=names)


def _column(series: Any, field: pa.Field[Any] | None, where: str) -> pa.Array[Any] | pa.ChunkedArray[Any]:
    import numpy as np
    import pandas as pd

    kind = series.dtype
    try:
        if kind == np.dtype(object) and field is not None:
            missing = (pd.NA, pd.NaT)
            return to_array([None if any(value is one for one in missing) else value for value in series], field.type)
        if isinstance(kind, np.dtype):
            # from an array of numpy: pyarrow makes null of each NaN in a Series
            made: pa.Array[Any] | pa.ChunkedArray[Any] = pa.array(series.to_numpy(), from_pandas=False)
        else:
            made = pa.array(series)
    except (ValueMisfit, pa.ArrowException) as error:
        raise SchemaError(f"{where}, {kind} in pandas: {error}") from error
    if field is not None and pa.types.is_integer(field.type) and kind.kind == "f" and series.isna().any():
        raise SchemaError(
            f"{where} is {kind} in pandas and has a NaN, declared as {field.type}, which has nulls but no NaN; keep the "
            "Arrow type of the input, or convert the column with astype('Int64')"
        )
    return made
