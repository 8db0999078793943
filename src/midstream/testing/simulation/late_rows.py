"""Jobs that use late rows: which rows are late legitimately differs from run to run.

A run is compared with one without failures in which the very same rows are late. So each row must be either in the
results or in the side output of late rows, exactly once. This works for tumbling windows, where a row is late as a
whole, if the job reads their late rows; late rows that the job does not read are lost, which is reported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pyarrow as pa

from midstream.engine.graph.logical_graph import Input, LogicalGraph
from midstream.engine.operators.base import Operator, OperatorContext, Output
from midstream.engine.operators.windows.window_factory import LATE
from midstream.testing.simulation.output_compare import rows_of
from midstream.testing.simulation.simulated_job import SimulatedJob


class LateGate(Operator):
    """An operator before a window that makes exactly these rows late."""

    keeps_rows = True

    def __init__(self, schema: pa.Schema, late: pa.Table | None) -> None:
        self.schema = schema
        self.side_outputs = {LATE: schema}
        self._late = late
        self._left: Counter[tuple[tuple[str, Any], ...]]
        self._out: Output

    def open(self, context: OperatorContext, out: Output) -> None:
        self._out = out
        self._left = rows_of(self._late)

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        is_late = []
        for row in range(batch.num_rows):
            [key] = rows_of(pa.Table.from_batches([batch.slice(row, 1)]))
            is_late.append(self._left[key] > 0)
            self._left[key] -= is_late[-1]
        self._out.emit(batch.filter(pa.array([not late for late in is_late])))
        if any(is_late):
            self._out.emit(batch.filter(pa.array(is_late)), LATE)


def held_late(job: SimulatedJob, late: Mapping[str, pa.Table | None]) -> SimulatedJob:
    """Return the same job, in which exactly the rows of `late`, by uid of the window, are late."""
    graph = LogicalGraph(list(job.logical.nodes))
    for uid, rows in late.items():
        window = next(node for node in graph.nodes if node.uid == uid)
        schema = window.inputs[0].schema
        operator = LateGate(schema, rows)
        gate = replace(window, kind="late gate", name="", uid=f"late rows of {uid}", schema=schema, operator=operator)
        gate = graph.add(gate)
        gated = replace(window.inputs[0], node=gate.id, tag=None)
        for number, node in enumerate(graph.nodes):
            if node.id == window.id:
                graph.nodes[number] = replace(node, inputs=(gated,))
            elif any(_is_late_of(entry, window.id) for entry in node.inputs):
                inputs = (replace(i, node=gate.id) if _is_late_of(i, window.id) else i for i in node.inputs)
                graph.nodes[number] = replace(node, inputs=tuple(inputs))
    return SimulatedJob(graph, job.config, job.inputs, job.own_names, job.is_tapped)


def _is_late_of(entry: Input, window: int) -> bool:
    return entry.node == window and entry.tag == LATE
