"""The events as Parquet files in the order of their times, which every engine can read."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq

from midstream_lab.bench.nexmark.generator import Events

EVENTS_PER_FILE: Final = 250_000
_DIRECTORY: Final = "midstream-nexmark-{}"
"""In the directory for temporary files. What is there once is read by later runs."""


def written(count: int) -> Path:
    """Return the directory with `count` events in files of EVENTS_PER_FILE, all columns, compressed with Snappy as Spark
    and Flink do; it is made unless it exists. Files have the order of their names and of their times of modification.
    """
    directory = Path(tempfile.gettempdir(), _DIRECTORY.format(count))
    if directory.is_dir():
        return directory
    events = Events(count, lanes=1)
    made = Path(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=directory.parent))
    try:
        for number, first in enumerate(range(0, count, EVENTS_PER_FILE)):
            path = made / f"events-{number:05d}.parquet"
            batch = events(np.arange(first, min(count, first + EVENTS_PER_FILE)))
            with pq.ParquetWriter(path, batch.schema, compression="snappy") as file:
                file.write_batch(batch)
            os.utime(path, (number, number))
        made.rename(directory)
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        if not directory.is_dir():  # else another process was faster
            raise
    return directory
