"""An operator of the engine, wrapped by one of the simulator."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import pyarrow as pa

from midstream.engine.core.arrow_types import to_list
from midstream.engine.operators.base import Combiner, Operator, OperatorContext, Output, Snapshot
from midstream.engine.state.columnar import FrameRun
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.state_parts import StatePart
from midstream_lab.jobs.recorded_rows import Outside


class Around(Operator):
    """Passes all calls on to `inner`; subclasses check them, or change the input."""

    def __init__(self, outside: Outside, inner: Operator) -> None:
        self._outside = outside
        self._inner = inner
        self.watermark_delay_us = inner.watermark_delay_us

    def state_settings(self) -> Mapping[str, Mapping[str, str]]:
        return self._inner.state_settings()

    def state_forms(self) -> Mapping[str, pa.Schema]:
        return self._inner.state_forms()

    def upgradable_states(self) -> Mapping[str, DeclaredState] | None:
        return self._inner.upgradable_states()

    def combiner(self, tags: Collection[str]) -> Combiner | None:
        return self._inner.combiner(tags)

    def open(self, context: OperatorContext, out: Output) -> None:
        self._outside.check_open(context)
        self._inner.open(context, out)

    def state_runs(self) -> Iterable[FrameRun]:
        return self._inner.state_runs()

    def restore(self, parts: Mapping[str, StatePart]) -> None:
        self._inner.restore(parts)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self._outside.work(batch.num_rows)
        if self._outside.poison:
            self._outside.check_poison(self._ids(batch))
        self._inner.process(batch, port)

    def _ids(self, batch: pa.RecordBatch) -> list[int]:
        """Return the ids of the rows that `batch` has or, if it is combined, stands for."""
        return to_list(batch.column("id"))

    def advance_watermark(self, watermark_us: int) -> bool:
        return self._inner.advance_watermark(watermark_us)

    def snapshot(self, checkpoint_id: int) -> Snapshot:
        return self._inner.snapshot(checkpoint_id)

    def close(self) -> None:
        self._inner.close()
