"""Limits the threads of libraries in a slot process to one each.

A slot is one core's worth of work on one loop thread. polars, Arrow and BLAS would otherwise each start a thread per
core in every slot. This must run before they are imported; it imports nothing itself.
"""

from __future__ import annotations

import os
from typing import Final

ENVIRONMENT: Final = {
    "POLARS_MAX_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "NUMEXPR_NUM_THREADS": "1",
    "ARROW_IO_THREADS": "2",
}


def limit_threads() -> None:
    """Limit this process; the user's settings in the environment take precedence."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import pyarrow as pa

    pa.set_cpu_count(1)
