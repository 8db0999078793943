"""In a real job the operator of a chain that takes its time is named."""

from __future__ import annotations

import time
from pathlib import Path

from midstream import Environment
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until


def slowly(row: dict[str, int]) -> dict[str, int]:
    end_s = time.monotonic() + 0.001
    while time.monotonic() < end_s:
        pass
    return row


def test_the_slow_function_in_a_chain_is_named(tmp_path: Path) -> None:
    env = Environment("chain", parallelism=1, checkpoint_dir=tmp_path / "state")
    numbers = env.generate(lambda i: {"n": i}, rows_per_s=1_000_000).uid("numbers")
    chained = numbers.map(lambda row: row, {"n": int}).name("quick").map(slowly, {"n": int}).name("slow")
    chained.write_jsonl(tmp_path / "out")
    job = env.start(slots=ProcessSlots())
    try:
        slow = until(
            "a bottleneck whose operators are known",
            lambda: found if (found := job.status().bottleneck) and found.operator else None,
            60,
        )
        assert slow.operator == "slow", slow
        (vertex,) = (each for each in job.status().vertices if each.id == slow.vertex)
        assert sum(operator.work or 0.0 for operator in vertex.operators) < 1.001
    finally:
        job.cancel("the test is over", 30)
