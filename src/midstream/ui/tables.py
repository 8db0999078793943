"""A `JobStatus` as something rich can print: one table of operators, then what happened to the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from midstream.protocol.messages import CheckpointStatus, JobStatus, OperatorStatus, VertexStatus
from midstream.ui import text
from midstream.ui.rates import Rates, rows_handled

STATE_STYLE = {
    "running": "bold green",
    "finished": "bold green",
    "stopped": "bold yellow",
    "stopping": "yellow",
    "restarting": "bold yellow",
    "rescaling": "bold yellow",
    "failed": "bold red",
}
BAR_CELLS = 6
WIDE = 118
"""Terminal columns from which on every column of the operator table fits."""
SLOW_MS = 2000
"""From so long on it is said that a checkpoint is in progress."""
ALIGNMENT_MS = 100
"""From so long on it is said that a checkpoint's barriers had to be waited for."""
WARNINGS_MAX = 3


def job_view(status: JobStatus, rates: Rates | None = None, *, tells_failures: bool = True) -> RenderableType:
    """Everything worth seeing of one job; `rates` adds rows per second.

    `tells_failures`: what the last failure was, where people have not been told of it as it happened.
    """
    return Group(
        Rule(_headline(status), align="left", style="dim"),
        OperatorTable(status, rates),
        *_facts(status, tells_failures),
    )


def _headline(status: JobStatus) -> Text:
    line = Text(text.printable(status.name), style="bold")
    line.append(f"  {status.state}", style=STATE_STYLE.get(status.state, "cyan"))
    recovered = recovered_share(status.vertices)
    if recovered is not None:
        line.append(f"  recovering {_percent(recovered)}", style="not bold yellow")
    line.append(f"  {text.span((status.now_ms - status.started_ms) / 1e3)}", style="not bold")
    line.append(f"  slots {status.slots}/{status.slots_needed}", style="not bold")
    line.append(f"  {status.job_id}", style="not bold dim")
    return line


class OperatorTable:
    """One row per operator; operators chained into one task share its watermark and bars.

    A renderable of rich: a terminal narrower than `WIDE` columns gets fewer and shorter ones.
    """

    def __init__(self, status: JobStatus, rates: Rates | None = None) -> None:
        self._status = status
        self._rates = rates

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield operator_table(self._status, self._rates, wide=options.max_width >= WIDE)


def operator_table(status: JobStatus, rates: Rates | None, wide: bool) -> Table:
    """The table itself; `rates` adds rows per second."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False)
    table.add_column("operator", min_width=16, overflow="fold")
    table.add_column("×", justify="right")
    for header in ("rows in", "rows out") if wide else ("rows",):
        table.add_column(header, justify="right", no_wrap=True)
    if rates is not None:
        table.add_column("rows/s", justify="right", no_wrap=True)
    table.add_column("watermark (UTC)", no_wrap=True)
    if wide:
        table.add_column("lag", justify="right", no_wrap=True)
    table.add_column("busy", no_wrap=True)
    table.add_column("backpressured" if wide else "backpr.", no_wrap=True)
    names = names_shown(status)
    for vertex in status.vertices:
        for index, operator in enumerate(vertex.operators):
            first = index == 0
            name = Text("" if first else "└ ", style="dim")
            name.append(text.printable(names[operator.uid]), style="not dim")
            if first:
                name.append(_states(vertex), style="yellow")
            if operator.late_rows:
                name.append(f"  {text.rows(operator.late_rows)} late rows dropped", style="bold yellow")
            counts = (operator.rows_in, operator.rows_out) if wide else (rows_handled(operator),)
            cells: list[RenderableType] = [name, str(operator.parallelism)]
            cells += [text.rows(count) if count else "" for count in counts]
            if rates is not None:
                rate = rates.rows_per_s(operator.uid)
                cells.append("" if rate is None else text.short(rate))
            if first:
                cells += _task_cells(vertex, status.now_ms, wide)
            table.add_row(*cells)
    return table


def names_shown(status: JobStatus) -> dict[str, str]:
    """By uid: the operator's name, and where several have the same one, what tells them apart."""
    operators = [operator for vertex in status.vertices for operator in vertex.operators]
    times = Counter(operator.name for operator in operators)
    return {
        operator.uid: operator.name if times[operator.name] == 1 else _full_name(operator) for operator in operators
    }


def _full_name(operator: OperatorStatus) -> str:
    """Uids that are not the program's own begin with the kind of the operator, which mostly is its name."""
    return operator.uid if operator.uid.startswith(operator.name) else f"{operator.name} ({operator.uid})"


def _task_cells(vertex: VertexStatus, now_ms: int, wide: bool) -> list[RenderableType]:
    mark = text.watermark(vertex.watermark_us)
    if vertex.states.get("finished") == vertex.parallelism:
        return [mark]
    if not wide:
        return [mark.removeprefix("20"), share(vertex.busy), share(vertex.backpressured)]
    lag = text.lag(vertex.watermark_us, now_ms)
    return [mark, lag, bar(vertex.busy, "green"), bar(vertex.backpressured, "red")]


def _states(vertex: VertexStatus) -> str:
    """Said only when it is not the normal one: all subtasks running, with nothing left to recover."""
    states = {state: count for state, count in vertex.states.items() if count and state != "running"}
    if len(states) == 1 and sum(states.values()) == vertex.parallelism:
        said = list(states)
    else:
        said = [", ".join(f"{count} {state}" for state, count in sorted(states.items()))] if states else []
    recovered = recovered_share([vertex])
    if recovered is not None:
        said.append(f"recovering {_percent(recovered)}")
    return "".join(f"  {what}" for what in said)


def _percent(part: float) -> str:
    """Rounded down: not 100 % before it is."""
    return f"{int(part * 100)} %"


def recovered_share(vertices: Sequence[VertexStatus]) -> float | None:
    """Of the rows in flight that they began with: how much has been worked off. None when nothing is left."""
    subtasks = [subtask for vertex in vertices for subtask in vertex.recovering]
    whole = sum(subtask.to_recover_bytes for subtask in subtasks)
    return sum(subtask.recovered_bytes for subtask in subtasks) / whole if whole else None


def share(part: float) -> str:
    """A percentage of four characters, of a part from 0 to 1."""
    return f"{min(1.0, max(0.0, part)):4.0%}"


def bar(part: float, color: str) -> Text:
    """A bar of `part` (0 to 1) and the percentage."""
    full = round(min(1.0, max(0.0, part)) * BAR_CELLS)
    line = Text("━" * full, style=color)
    line.append("━" * (BAR_CELLS - full), style="bright_black")
    line.append(f" {share(part)}", style="default")
    return line


def _facts(status: JobStatus, tells_failures: bool) -> list[RenderableType]:
    facts: list[RenderableType] = [_checkpoints(status)]
    if status.restored_from:
        facts.append(Text(f"restored from {text.printable(status.restored_from)}", style="dim", overflow="fold"))
    if any(status.slot_memory_bytes):
        facts.append(Text(f"slot memory {', '.join(_slot_sizes(status))}", style="dim"))
    if status.restarts or status.failures:
        line = Text(f"restarts {status.restarts}", style="yellow")
        if status.failures:
            last = status.failures[0]
            ago = text.span(max(0, status.now_ms - last.at_ms) / 1e3)
            line.append(f"  last failure {ago} ago", style="yellow")
            if tells_failures:
                line.append(": ", style="yellow")
                line.append(text.printable(last.summary), style="red")
        facts.append(line)
    facts += [Text(text.printable(wait.sentence), style="yellow") for wait in status.waiting]
    facts += [
        Text(f"warning: {text.printable(warning)}", style="yellow") for warning in status.warnings[-WARNINGS_MAX:]
    ]
    return facts


def _slot_sizes(status: JobStatus) -> list[str]:
    """With process ids where they are known: for a look at one, or to see what happens when it is killed."""
    sizes = [text.size(used) for used in status.slot_memory_bytes]
    if len(sizes) != len(status.slot_pids):
        return sizes
    return [f"{size} (process {pid})" for size, pid in zip(sizes, status.slot_pids, strict=True)]


def _checkpoints(status: JobStatus) -> Text:
    if status.checkpoint_dir is None:
        return Text("no checkpoints: the job has no checkpoint directory", style="dim")
    line = Text("checkpoints ", style="dim")
    line.append(f"{status.checkpoints_completed} completed", style="not dim")
    if status.checkpoints_failed:
        line.append(f", {status.checkpoints_failed} failed", style="not dim yellow")
    last = status.last_checkpoint
    if last is not None:
        line.append("; last: ", style="dim")
        line.append(checkpoint_line(last), style="not dim")
        line.append(f", {text.span(max(0, status.now_ms - last.created_ms) / 1e3)} ago", style="not dim")
    line.append(f"  in {text.printable(status.checkpoint_dir)}", style="dim")
    for one in status.checkpoints:
        if one.state == "in_progress" and one.duration_ms >= SLOW_MS:
            line.append(f"\ncheckpoint {one.id} has been in progress for {text.span(one.duration_ms / 1e3)}", "yellow")
    return line


def checkpoint_line(checkpoint: CheckpointStatus) -> str:
    """`3 (120 ms, 1.2 MiB)`, or why there is none."""
    if checkpoint.state == "completed":
        took = text.span(checkpoint.duration_ms / 1e3)
        in_flight = f", {text.size(checkpoint.in_flight_bytes)} in flight" if checkpoint.in_flight_bytes else ""
        waited = checkpoint.alignment_ms >= ALIGNMENT_MS
        aligned = f", aligned in {text.span(checkpoint.alignment_ms / 1e3)}" if waited else ""
        return f"{checkpoint.id} ({took}, {text.size(checkpoint.state_bytes)}{in_flight}{aligned})"
    state = checkpoint.state.replace("_", " ")
    reason = f": {text.printable(checkpoint.reason)}" if checkpoint.reason else ""
    return f"{checkpoint.id} {state}{reason}"


def jobs_table(statuses: Sequence[JobStatus]) -> Table:
    """One row per job, for `midstream list`."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("job", "name", "state"):
        table.add_column(header)
    for header in ("since", "slots", "rows read", "checkpoints", "restarts"):
        table.add_column(header, justify="right")
    for status in statuses:
        table.add_row(
            status.job_id,
            Text(text.printable(status.name), style="bold"),
            Text(status.state, style=STATE_STYLE.get(status.state, "cyan")),
            text.span((status.now_ms - status.started_ms) / 1e3),
            f"{status.slots}/{status.slots_needed}",
            text.rows(rows_read(status)),
            str(status.checkpoints_completed),
            str(status.restarts),
        )
    return table


def rows_read(status: JobStatus) -> int:
    """Rows given out by all sources; what was read again after a failure counts again."""
    targets = {target for _, target, _ in status.edges}
    return sum(v.operators[0].rows_out for v in status.vertices if v.operators and v.id not in targets)


def _ends(status: JobStatus) -> list[OperatorStatus]:
    """The operators at which rows come in and go out: sources, and whatever nothing follows."""
    followed = {source for source, _, _ in status.edges}
    fed = {target for _, target, _ in status.edges}
    chains = [vertex for vertex in status.vertices if vertex.operators]
    return [
        *(vertex.operators[0] for vertex in chains if vertex.id not in fed),
        *(vertex.operators[-1] for vertex in chains if vertex.id not in followed),
    ]


def progress_line(status: JobStatus, rates: Rates) -> str:
    """The status in one line, for logs and pipes."""
    parts = [f"{text.clock(status.now_ms)} {text.printable(status.name)} {status.state}"]
    names = names_shown(status)
    for operator in _ends(status):
        if operator.rows_in or operator.rows_out:
            rate = rates.rows_per_s(operator.uid)
            speed = "" if rate is None else f" ({text.short(rate)}/s)"
            parts.append(f"{text.printable(names[operator.uid])} {text.rows(rows_handled(operator))} rows{speed}")
    recovered = recovered_share(status.vertices)
    if recovered is not None:
        parts.append(f"recovering {_percent(recovered)}")
    marks = [v.watermark_us for v in status.vertices if v.watermark_us is not None]
    if marks:
        parts.append(f"watermark {text.watermark(min(marks))}")
    late_rows = sum(operator.late_rows for vertex in status.vertices for operator in vertex.operators)
    if late_rows:
        parts.append(f"dropped {text.rows(late_rows)} late rows")
    if status.last_checkpoint is not None:
        parts.append(f"checkpoint {checkpoint_line(status.last_checkpoint)}")
    if status.restarts:
        parts.append(f"restarts {status.restarts}")
    if status.waiting:
        parts.append(text.printable(status.waiting[0].sentence))
    return " | ".join(parts)
