"""The flow on the edges of a job's graph, as a table for a terminal."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from midstream.cli import formatting
from midstream.engine.protocol.job_status import HeldBackStatus, JobStatus, VertexStatus

NAME_CELLS_MAX = 20
FAR_US = 300_000_000
"""What holds event time back is reported once it is this far behind the most advanced."""
SILENT_MS = 20_000
"""A source or split without any row is reported once the job has run for this long."""


def edge_table(status: JobStatus, names: dict[str, str]) -> Table | None:
    """Return a table with one line per edge; `names` are those of operators by uid. None if there are none."""
    if not status.edges:
        return None
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False, collapse_padding=True)
    table.add_column("edge", no_wrap=True)
    table.add_column("", no_wrap=True, style="dim")
    for header in ("rows", "bytes", "rows/batch", "behind"):
        table.add_column(header, justify="right", no_wrap=True)
    vertices = {vertex.id: vertex for vertex in status.vertices}
    for (source, target, partitioning), flow in zip(status.edges, status.flows, strict=True):
        edge = Text(_name(vertices[source], names, -1)).append(" → ", style="dim")
        edge.append(_name(vertices[target], names, 0))
        per_batch = formatting.short(flow.rows / flow.batches) if flow.batches else ""
        table.add_row(
            edge,
            partitioning,
            formatting.rows(flow.rows),
            formatting.size(flow.bytes),
            per_batch,
            formatting.lag(flow.watermark_us, status.now_ms),
        )
    return table


def held_back_lines(status: JobStatus) -> list[str]:
    """Return a sentence for each subtask or split that event time waits for, if it is far behind the others or has had
    no rows, and for each source some of whose splits wait for such a one.
    """
    if status.state != "running":
        return []
    fed = {target for _, target, _ in status.edges}
    lines: dict[tuple[int, int, str], str] = {}
    parallelism = {vertex.id: vertex.parallelism for vertex in status.vertices}
    for vertex in sorted(status.vertices, key=lambda each: each.id not in fed):
        held = vertex.held_back
        if held is None or not _is_worth_reporting(status, held):
            continue
        subtask = f", subtask {held.subtask}" if parallelism[held.vertex] > 1 else ""
        split = f", split {held.split}" if held.split else ""
        if held.behind_us is not None:
            how = f"{formatting.span(held.behind_us / 1e6)} behind the most advanced"
        else:
            how = f"no {'row' if held.split else 'watermark'} of it has arrived"
        line = f"event time of {vertex.name} is held back by {held.name}{subtask}{split}: {how}"
        lines.setdefault((held.vertex, held.subtask, held.split), formatting.printable(line))
    ahead = [
        formatting.printable(f"{vertex.name}: {vertex.splits_ahead:,} of its splits wait, ahead by more than drift")
        for vertex in status.vertices
        if vertex.splits_ahead
    ]
    return [*lines.values(), *ahead]


def _is_worth_reporting(status: JobStatus, held: HeldBackStatus) -> bool:
    if held.behind_us is None:
        return status.now_ms - status.started_ms >= SILENT_MS
    return held.behind_us >= FAR_US


def _name(vertex: VertexStatus, names: dict[str, str], at: int) -> str:
    """Return the name of the operator at which the edge begins or ends."""
    name = Text(formatting.printable(names[vertex.operators[at].uid] if vertex.operators else vertex.name))
    name.truncate(NAME_CELLS_MAX, overflow="ellipsis")
    return name.plain
