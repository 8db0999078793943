"""Columns of a run in a file on local disk, mapped into memory: the kernel reads what is accessed, and may drop it again."""

from __future__ import annotations

from typing import IO, Any, Final

import numpy.typing as npt
import polars as pl
import pyarrow as pa

from midstream.engine.core.interfaces import LocalDisk
from midstream.engine.state.columnar import Columns

ALIGNMENT: Final = 16
"""Decimals that do not begin at a multiple of this are copied when they are mapped."""
VIEW_BYTES: Final = 16
SHIFT: Final = "_" * 8
"""What lengthens the name of one column, which moves everything after it by half of ALIGNMENT."""


def bytes_of(column: pl.DataFrame | npt.NDArray[Any] | None) -> int:
    """Return the bytes that a column, or all of a frame, takes. polars does not count the views of texts and bytes."""
    if column is None:
        return 0
    if not isinstance(column, pl.DataFrame):
        return int(column.nbytes)
    views = sum(dtype in (pl.String, pl.Binary) for dtype in column.dtypes)
    return int(column.estimated_size()) + VIEW_BYTES * column.height * views


def on_disk(columns: Columns, disk: LocalDisk) -> Columns:
    """Write columns of one run into a file, and return equal columns that lie in it. Raises what `disk` raises.

    The file has the layout that polars computes with, so that nothing is copied when it is read.
    """
    series: list[pl.Series] = []
    for column in columns:
        if isinstance(column, pl.DataFrame):
            series += column.get_columns()
        elif column is not None:
            series.append(pl.Series(values=column))
    mapped = _mapped(series, disk)
    moved: list[pl.DataFrame | npt.NDArray[Any] | None] = []
    for column in columns:
        if isinstance(column, pl.DataFrame):
            own, mapped = mapped[: column.width], mapped[column.width :]
            moved.append(pl.DataFrame(dict(zip(column.columns, own, strict=True))))
        elif column is not None:
            moved.append(mapped.pop(0).to_numpy())
        else:
            moved.append(None)
    return tuple(moved)


def table_on_disk(table: pa.Table, disk: LocalDisk) -> pa.Table:
    """Write a table into a file, and return an equal one that lies in it. Raises what `disk` raises."""

    def write(file: IO[bytes]) -> None:
        sink = pa.PythonFile(file, mode="w")  # type: ignore[arg-type]  # it takes any file object
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)

    return pa.ipc.open_file(pa.BufferReader(pa.py_buffer(disk.map(write)))).read_all()


def _mapped(series: list[pl.Series], disk: LocalDisk) -> list[pl.Series]:
    for shift in ("", SHIFT):
        frame = pl.DataFrame({str(number): each for number, each in enumerate(series)}).rename({"0": f"0{shift}"})

        def write(file: IO[bytes], frame: pl.DataFrame = frame) -> None:
            newest = pl.CompatLevel.newest()  # text as polars has it
            frame.write_ipc(file, compression="uncompressed", compat_level=newest, record_batch_size=frame.height)

        batch = pa.ipc.open_file(pa.BufferReader(pa.py_buffer(disk.map(write)))).get_batch(0)
        if not any(map(_has_decimals, batch.schema.types)) or _are_aligned(batch):
            break
    read = pl.from_arrow(batch, rechunk=False)
    assert isinstance(read, pl.DataFrame), type(read)
    return read.get_columns()


def _has_decimals(kind: pa.DataType) -> bool:
    if pa.types.is_decimal(kind):
        return True
    return any(_has_decimals(kind.field(index).type) for index in range(kind.num_fields))


def _are_aligned(batch: pa.RecordBatch) -> bool:
    return all(buffer.address % ALIGNMENT == 0 for column in batch.columns for buffer in column.buffers() if buffer)
