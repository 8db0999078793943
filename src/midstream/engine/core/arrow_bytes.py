"""Arrow bytes that come from a checkpoint directory become rows here, and nowhere else.

Arrow trusts the offsets that it reads: an offset beyond its buffer is a wild pointer, and the checksum of such bytes may
be right. So everything that is read is validated as a whole before any value is used.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

NOT_ARROW: Final = (pa.ArrowException, OSError, NotImplementedError, EOFError, UnicodeDecodeError)
"""The exceptions for bytes that are not valid Arrow data of the expected schema."""


def read_table(data: bytes | memoryview) -> pa.Table:
    """Read a stream, whose rows lie in `data`. Raises one of NOT_ARROW."""
    table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
    table.validate(full=True)
    return table


def read_batch(data: bytes | memoryview, schema: pa.Schema) -> pa.RecordBatch:
    """Read one batch, whose rows lie in `data`. Raises one of NOT_ARROW."""
    batch = pa.ipc.read_record_batch(pa.py_buffer(data), schema)
    batch.validate(full=True)
    return batch
