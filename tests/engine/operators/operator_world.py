"""A world of one operator: its context, what it emits, and snapshots that are stored and dealt out as in a job."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import cloudpickle
import numpy as np
import pyarrow as pa

from in_memory import CountingIds
from midstream.engine.core.elements import Assigned
from midstream.engine.core.key_groups import key_group_range
from midstream.engine.operators.base import Operator, OperatorContext, Splits
from midstream.engine.state.job_code import own_code
from midstream.engine.state.state_parts import KEY_GROUP, Chunk, Redistribute, StatePart

Parts = Mapping[str, StatePart]


class FakeTimer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeClock:
    """Stands still by default; `step_s` passes with each reading. `ms` is the wall clock."""

    def __init__(self) -> None:
        self.ms = 1_000_000
        self.set_by_ms = 0
        """By how much the wall clock was set, in all."""
        self.step_s = 0.0
        self._s = 0.0

    def now_ms(self) -> int:
        return self.ms

    def monotonic_s(self) -> float:
        self._s += self.step_s
        return self._s + (self.ms - self.set_by_ms) / 1000

    own_core_s = stopwatch_s = processor_s = monotonic_s
    core_share = 1.0

    def set(self, by_ms: int) -> None:
        self.ms += by_ms
        self.set_by_ms += by_ms


class Collected:
    """What an operator emits. `rows(tag)` as dicts, in order."""

    def __init__(self) -> None:
        self.batches: list[tuple[str | None, pa.RecordBatch]] = []
        self.watermarks: list[int] = []
        self.idles: list[bool] = []
        self.assigned: list[Assigned] = []

    def emit(self, batch: pa.RecordBatch, tag: str | None = None) -> None:
        batch.validate(full=True)
        # what is valid in memory may still be written as bytes that cannot be read
        assert pa.ipc.read_record_batch(batch.serialize(), batch.schema).num_rows == batch.num_rows
        self.batches.append((tag, batch))

    def watermark(self, watermark_us: int) -> None:
        self.watermarks.append(watermark_us)

    def idle(self, idle: bool, assigned: Assigned = ()) -> None:
        self.idles.append(idle)
        self.assigned.append(assigned)

    def rows(self, tag: str | None = None) -> list[dict[str, Any]]:
        return [row for other, batch in self.batches if other == tag for row in batch.to_pylist()]

    def clear(self) -> None:
        self.batches.clear()


class World:
    """One subtask of an operator, opened, with everything it is given."""

    def __init__(
        self,
        operator: Operator,
        *,
        subtask: int = 0,
        parallelism: int = 1,
        max_parallelism: int = 16,
        parts: Parts | None = None,
        clock: FakeClock | None = None,
        ids: CountingIds | None = None,
        splits: Splits | None = None,
        **context: Any,
    ) -> None:
        self.clock = clock or FakeClock()
        self.ids = ids or CountingIds()
        self.out = Collected()
        self.failures: list[BaseException] = []
        self.alarms: list[tuple[int, Callable[[], None], FakeTimer]] = []
        self.key_groups = key_group_range(subtask, parallelism, max_parallelism)
        operator.own = own_code(operator)
        self.operator: Operator = pickle.loads(cloudpickle.dumps(operator))
        self.operator.open(
            OperatorContext(
                uid="op",
                name="op",
                subtask=subtask,
                parallelism=parallelism,
                max_parallelism=max_parallelism,
                key_groups=self.key_groups,
                slice_s=0.01,
                clock=self.clock,
                executor=None,  # type: ignore[arg-type]
                ids=self.ids,
                storage=None,
                call_at=self._call_at,
                call_later=lambda delay_s, mail: self._call_at(self.clock.now_ms() + round(delay_s * 1000), mail),
                fail=self.failures.append,
                splits=splits,
                **context,
            ),
            self.out,
        )
        if parts:
            self.operator.restore(parts)

    def _call_at(self, time_ms: int, mail: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer()
        self.alarms.append((time_ms, mail, timer))
        return timer

    def advance_clock(self, to_ms: int) -> None:
        """Let the wall clock reach `to_ms`, ringing what is due on the way."""
        for _ in range(10_000):
            due = [alarm for alarm in self.alarms if alarm[0] <= to_ms and not alarm[2].cancelled]
            if not due:
                break
            first = min(due, key=lambda alarm: alarm[0])
            self.alarms.remove(first)
            self.clock.ms = max(self.clock.ms, first[0])
            first[1]()
        self.clock.ms = max(self.clock.ms, to_ms)

    def process(self, batch: pa.RecordBatch, port: int = 0) -> None:
        self.operator.process(batch, port)

    def advance(self, watermark_us: int) -> int:
        """Fire all that is due; how many slices it took."""
        for slices in range(1, 100_000):
            if self.operator.advance_watermark(watermark_us):
                return slices
        raise AssertionError("firing never ends")

    def snapshot(self) -> Parts:
        return dict(self.operator.snapshot(1).complete().parts)


def deal_out(snapshots: Sequence[Parts], key_groups: range) -> Parts:
    """What a new subtask that owns `key_groups` gets of the snapshots of all old ones."""
    dealt: dict[str, StatePart] = {}
    for parts in snapshots:
        for name, part in parts.items():
            if part.redistribute is Redistribute.BROADCAST:
                dealt.setdefault(name, part)
                continue
            assert part.redistribute is Redistribute.KEYED
            chunks = list(dealt[name].chunks) if name in dealt else []
            for chunk in part.chunks:
                groups = chunk.table.column(KEY_GROUP).to_numpy()
                rows = (groups >= key_groups.start) & (groups < key_groups.stop)
                if np.any(rows):
                    chunks.append(Chunk(f"{chunk.id}/{key_groups.start}", stored(chunk.table.filter(pa.array(rows)))))
            if chunks:
                dealt[name] = StatePart(Redistribute.KEYED, tuple(chunks))
    return dealt


def stored(table: pa.Table) -> pa.Table:
    """As it comes back from a file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return pa.ipc.open_stream(sink.getvalue()).read_all()


def restored(
    make: Callable[[], Operator],
    snapshots: Sequence[Parts],
    parallelism: int,
    max_parallelism: int,
    **context: Any,
) -> list[World]:
    """All subtasks of an operator, from what the subtasks of before have stored."""
    return [
        World(
            make(),
            subtask=subtask,
            parallelism=parallelism,
            max_parallelism=max_parallelism,
            parts=deal_out(snapshots, key_group_range(subtask, parallelism, max_parallelism)),
            **context,
        )
        for subtask in range(parallelism)
    ]
