"""What it costs to check values that functions give: rows that they return, and values that they put into a state.

    python benchmarks/values.py [--json]

Nanoseconds per row or value, the best of many short rounds. To compare with another commit, run it there too
(`git worktree add DIRECTORY COMMIT`, then with `PYTHONPATH=DIRECTORY/src`), in turns: machines change their speed.
"""

from __future__ import annotations

import json
import sys
import timeit
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from midstream.engine.core.key_groups import key_group_range
from midstream.engine.operators.base import OperatorContext
from midstream.engine.operators.functions.function_operator import Port
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.row_conversion import map_rows, to_batch
from midstream.engine.state.keyed_states import KeyScope, ValueState

ROWS = 2_000
ROUNDS = 300
COLUMNS: dict[str, pa.DataType] = {"k": pa.int64(), "v": pa.int64(), "x": pa.float64(), "s": pa.large_string()}
SCHEMA = pa.schema(COLUMNS)


def best_ns(work: Callable[[], object], count: int) -> float:
    return round(min(timeit.repeat(work, number=1, repeat=ROUNDS)) / count * 1e9, 1)


def change(row: dict[str, Any]) -> dict[str, Any]:
    return {"k": row["k"], "v": row["v"] + 1, "x": row["x"] * 2, "s": row["s"]}


def set_each(state: ValueState[Any], values: list[Any]) -> Callable[[], None]:
    bound = state.bound("held", KeyScope(1, is_set=True))

    def work() -> None:
        for value in values:
            bound.value = value

    return work


class Total(KeyedProcessFunction):
    total = ValueState(pa.int64(), default=0)

    def process(self, row: dict[str, Any], ctx: Any) -> dict[str, Any]:
        self.total.value += row["v"]
        return {**row, "v": self.total.value}


class Nowhere:
    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        pass


class Clock:
    def now_ms(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        return 0.0

    own_core_s = monotonic_s
    core_share = 1.0


def keyed_function(batch: pa.RecordBatch) -> Callable[[], None]:
    operator = ProcessOperator("total", Total(), [Port("process", ("k",), None, SCHEMA)], SCHEMA, {})
    given: dict[str, Any] = {
        **dict.fromkeys(("executor", "ids", "storage", "call_at", "fail")),
        "clock": Clock(),
        "slice_s": 1.0,
        "key_groups": key_group_range(0, 1, 128),
    }
    operator.open(OperatorContext("total", "total", 0, 1, 128, **given), Nowhere())  # type: ignore[arg-type]
    return lambda: operator.process(batch, 0)


def main() -> None:
    rows = [{"k": i % 100, "v": i, "x": i / 7, "s": f"user-{i}"} for i in range(ROWS)]
    batch = to_batch(rows, SCHEMA, "rows")
    small, large = list(range(ROWS)), [2**40 + i for i in range(ROWS)]
    figures = {
        "map_row": best_ns(lambda: map_rows(change, batch, SCHEMA, "map"), ROWS),
        "rows_to_batch_row": best_ns(lambda: to_batch(rows, SCHEMA, "rows"), ROWS),
        "keyed_function_row": best_ns(keyed_function(batch), ROWS),
        "set_int64": best_ns(set_each(ValueState(pa.int64()), small), ROWS),
        "set_large_int64": best_ns(set_each(ValueState(pa.int64()), large), ROWS),
        "set_float64": best_ns(set_each(ValueState(pa.float64()), [i / 7 for i in small]), ROWS),
        "set_string": best_ns(set_each(ValueState(pa.large_string()), [row["s"] for row in rows]), ROWS),
        "set_pickled": best_ns(set_each(ValueState(), small), ROWS),
    }
    if "--json" in sys.argv[1:]:
        print(json.dumps(figures))
    else:
        print("\n".join(f"{name:20} {figure:8.1f} ns" for name, figure in figures.items()))


if __name__ == "__main__":
    main()
