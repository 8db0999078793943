"""A `JobStatus` in a form that rich can print: one table of operators, then what happened to the job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.edge_table import edge_table, held_back_lines
from midstream.cli.rates import Rates, rows_handled
from midstream.engine.protocol.bottleneck import MOST, uneven
from midstream.engine.protocol.bottleneck import bottleneck as waited_for
from midstream.engine.protocol.job_status import CheckpointStatus, JobStatus, OperatorStatus, VertexStatus

STATE_STYLE = {
    "running": "bold green",
    "finished": "bold green",
    "stopped": "bold yellow",
    "stopping": "yellow",
    "restarting": "bold yellow",
    "rescaling": "bold yellow",
    "moving": "bold yellow",
    "failed": "bold red",
    "lost": "bold red",
}
BAR_CELLS = 6
WIDE = 118
"""The width of the terminal from which every column of the operator table fits."""
NAME_CELLS_MIN = 16
LINES_MIN = 5
"""The fewest lines of the operator table: its header, the first and the last operator, and the gap between them."""
SLOW_MS = 2000
"""A checkpoint in progress is mentioned after this time."""
ALIGNMENT_MS = 100
"""An alignment of at least this length is mentioned."""
WARNINGS_MAX = 3
USER_METRICS_MAX = 8
"""The number of a function's metrics that are shown; `--json` has all."""


def job_view(status: JobStatus, rates: Rates | None = None, *, shows_failures: bool = True) -> RenderableType:
    """Return everything worth seeing of one job; `rates` adds rows per second.

    `shows_failures`: include the last failure, if it was not shown when it occurred.
    """
    edges = edge_table(status, names_shown(status))
    more: list[RenderableType] = [] if edges is None else [edges]
    return Group(Headline(status), OperatorTable(status, rates), *more, *facts(status, shows_failures))


class LiveView:
    """The view within the lines of a terminal: a line for each fact; operators in the middle are left out.

    The first and the last operator and the bottleneck are among those shown. Failures are shown above it.
    """

    def __init__(self, status: JobStatus, rates: Rates) -> None:
        self._status = status
        self._rates = rates

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = facts(self._status, shows_failures=False)
        for line in lines:
            line.no_wrap, line.overflow = True, "ellipsis"
        yield Headline(self._status)
        yield OperatorTable(self._status, self._rates, lines_max=max(LINES_MIN, options.max_height - 1 - len(lines)))
        yield from lines


class Headline:
    """One line, in which the job's name gets the space that the rest leaves."""

    def __init__(self, status: JobStatus) -> None:
        self._status = status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        status = self._status
        rest = Text(f"  {status.state}", style=STATE_STYLE.get(status.state, "cyan"))
        recovered = recovered_share(status.vertices)
        if recovered is not None:
            rest.append(f"  recovering {_percent(recovered)}", style="not bold yellow")
        rest.append(f"  {formatting.span(max(0, status.now_ms - status.started_ms) / 1e3)}", style="not bold")
        rest.append(f"  slots {status.slots}/{status.slots_needed}", style="not bold")
        rest.append(f"  {status.job_id}", style="not bold dim")
        line = _shortened(status.name, options.max_width - rest.cell_len)
        line.stylize("bold")
        line.append_text(rest)
        line.append(f" {'─' * (options.max_width - line.cell_len - 1)}", style="not bold dim")
        line.truncate(options.max_width, overflow="crop")
        yield line


def _shortened(name: str, cells: int) -> Text:
    """Shorten a name to `cells`, but not below a few of them."""
    line = Text(formatting.printable(name))
    line.truncate(max(NAME_CELLS_MIN, cells), overflow="ellipsis")
    return line


class OperatorTable:
    """A table with one line per operator; operators chained into one task share its watermark and bars.

    A renderable of rich: a terminal narrower than `WIDE` columns gets fewer and shorter columns. `lines_max`: the limit
    on lines, including the header; operators in the middle are left out.
    """

    def __init__(self, status: JobStatus, rates: Rates | None = None, lines_max: int | None = None) -> None:
        self._status = status
        self._rates = rates
        self._lines_max = lines_max

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield operator_table(self._status, self._rates, options.max_width >= WIDE, self._lines_max)


def operator_table(status: JobStatus, rates: Rates | None, wide: bool, lines_max: int | None = None) -> Table:
    """Return the table itself; `rates` adds rows per second."""
    table = Table(box=None, pad_edge=False, header_style="dim", expand=False, collapse_padding=not wide)
    table.add_column("operator", min_width=NAME_CELLS_MIN)
    table.add_column("×", justify="right", no_wrap=True)
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
    slow = bottleneck(status)
    listed = [(vertex, operator) for vertex in status.vertices for operator in vertex.operators]
    slow_at = next((at for at, (vertex, _) in enumerate(listed) if vertex is slow), None)
    shown = _shown(len(listed), slow_at, len(listed) if lines_max is None else lines_max - 1)
    after = 0
    for at in shown:
        if at > after:
            table.add_row(Text(f"… {at - after} more", style="dim"))
        after = at + 1
        vertex, operator = listed[at]
        first = operator is vertex.operators[0]
        notes = Text(_states(vertex) if first else "", style="yellow")
        if first and vertex is slow:
            busiest = uneven(vertex)
            where = "" if busiest is None else f" in subtask {busiest.subtask}"
            notes.append(f"  bottleneck{where}", style="bold yellow")
        if vertex is slow and len(vertex.operators) > 1 and operator.work is not None and operator.work > MOST:
            notes.append(f"  {share(operator.work).strip()} of the work", style="bold yellow")
        if operator.late_rows:
            notes.append(f"  {formatting.rows(operator.late_rows)} late rows dropped", style="bold yellow")
        if operator.failed_rows:
            notes.append(f"  {formatting.rows(operator.failed_rows)} rows failed", style="bold yellow")
        if operator.bad_records:
            notes.append(f"  {formatting.rows(operator.bad_records)} bad records dropped", style="bold yellow")
        counts = (operator.rows_in, operator.rows_out) if wide else (rows_handled(operator),)
        cells: list[RenderableType] = [_Name(names[operator.uid], first, notes), str(operator.parallelism)]
        cells += [formatting.rows(count) if count else "" for count in counts]
        if rates is not None:
            rate = rates.rows_per_s(operator.uid)
            cells.append("" if rate is None else formatting.short(rate))
        if first:
            cells += _task_cells(vertex, status.now_ms, wide)
        table.add_row(*cells)
    return table


@dataclass(frozen=True, slots=True)
class _Name:
    """An operator's name in one line; remarks on the operator follow and are not shortened for it."""

    name: str
    begins_task: bool
    notes: Text

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        cells = len(self._indent) + Text(formatting.printable(self.name)).cell_len + self.notes.cell_len
        return Measurement(min(cells, NAME_CELLS_MIN), cells)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = Text(self._indent, style="dim")
        room = options.max_width - len(self._indent) - self.notes.cell_len
        line.append_text(_shortened(self.name, room)).stylize("not dim", len(self._indent))
        line.append_text(self.notes)
        line.truncate(options.max_width, overflow="ellipsis")
        yield line

    @property
    def _indent(self) -> str:
        return "" if self.begins_task else "└ "


def _shown(count: int, slow_at: int | None, lines_max: int) -> list[int]:
    """Return which of `count` operators are shown in `lines_max` lines; each run of hidden ones takes a line."""
    if count <= lines_max:
        return list(range(count))
    from_both_ends = [at for pair in zip(range(count - 1, -1, -1), range(count), strict=True) for at in pair]
    kept: set[int] = set()
    for at in (from_both_ends[0], from_both_ends[1], *([] if slow_at is None else [slow_at]), *from_both_ends):
        more = kept | {at}
        runs_left_out = sum(1 for each in range(count) if each not in more and (each == 0 or each - 1 in more))
        if len(more) + runs_left_out <= lines_max:
            kept = more
    return sorted(kept)


def bottleneck(status: JobStatus) -> VertexStatus | None:
    """Return the task that the others wait for, if there is one."""
    return waited_for(status.vertices, status.edges)


def _unevenness(status: JobStatus) -> list[Text]:
    """Describe what slows the bottleneck down, if it is one of its subtasks."""
    slow = bottleneck(status)
    busiest = uneven(slow) if slow is not None else None
    if slow is None or busiest is None:
        return []
    others = (slow.busy * slow.parallelism - busiest.busy) / (slow.parallelism - 1)
    line = (
        f"{slow.name}: subtask {busiest.subtask} is {share(busiest.busy).strip()} busy, "
        f"the other {slow.parallelism - 1} are {share(others).strip()} on average"
    )
    rows = sum(subtask.rows_in for subtask in slow.subtasks)
    if rows:
        line += f"; it has taken {share(busiest.rows_in / rows).strip()} of the rows"
    return [Text(formatting.printable(line), style="yellow")]


def names_shown(status: JobStatus) -> dict[str, str]:
    """Return each operator's name by uid; if several have the same one, with what distinguishes them."""
    operators = [operator for vertex in status.vertices for operator in vertex.operators]
    times = Counter(operator.name for operator in operators)
    return {
        operator.uid: operator.name if times[operator.name] == 1 else _full_name(operator) for operator in operators
    }


def _full_name(operator: OperatorStatus) -> str:
    """Return the full name. Uids that the program does not set begin with the kind of the operator, which usually is
    its name.
    """
    return operator.uid if operator.uid.startswith(operator.name) else f"{operator.name} ({operator.uid})"


def _task_cells(vertex: VertexStatus, now_ms: int, wide: bool) -> list[RenderableType]:
    mark = formatting.watermark(vertex.watermark_us)
    if vertex.states.get("finished") == vertex.parallelism:
        return [mark]
    if not wide:
        return [mark, share(vertex.busy), share(vertex.backpressured)]
    lag = formatting.lag(vertex.watermark_us, now_ms)
    return [mark, lag, bar(vertex.busy, "green"), bar(vertex.backpressured, "red")]


def _states(vertex: VertexStatus) -> str:
    """Describe the states, unless all subtasks are running with nothing left to recover."""
    states = {state: count for state, count in vertex.states.items() if count and state != "running"}
    if len(states) == 1 and sum(states.values()) == vertex.parallelism:
        notes = list(states)
    else:
        notes = [", ".join(f"{count} {state}" for state, count in sorted(states.items()))] if states else []
    recovered = recovered_share([vertex])
    if recovered is not None:
        notes.append(f"recovering {_percent(recovered)}")
    return "".join(f"  {what}" for what in notes)


def _percent(part: float) -> str:
    """Format a percentage, rounded down: never 100 % too early."""
    return f"{int(part * 100)} %"


def recovered_share(vertices: Sequence[VertexStatus]) -> float | None:
    """Return the share of the rows in flight at the start that has been processed; None if nothing is left."""
    subtasks = [subtask for vertex in vertices for subtask in vertex.recovering]
    whole = sum(subtask.to_recover_bytes for subtask in subtasks)
    return sum(subtask.recovered_bytes for subtask in subtasks) / whole if whole else None


def share(part: float) -> str:
    """Format a share from 0 to 1 as a percentage of four characters."""
    return f"{min(1.0, max(0.0, part)):4.0%}"


def bar(part: float, color: str) -> Text:
    """Return a bar of `part` (0 to 1) and the percentage."""
    full = round(min(1.0, max(0.0, part)) * BAR_CELLS)
    line = Text("━" * full, style=color)
    line.append("·" * (BAR_CELLS - full), style="bright_black")
    line.append(f" {share(part)}", style="default")
    return line


def facts(status: JobStatus, shows_failures: bool) -> list[Text]:
    """Return what happened to the job, one line per fact if there is room."""
    facts = _checkpoints(status)
    if status.restored_from:
        facts.append(Text(f"restored from {formatting.printable(status.restored_from)}", style="dim"))
    if any(status.slot_memory_bytes):
        facts.append(Text(f"slot memory {', '.join(_slot_sizes(status))}", style="dim"))
    if any(status.slot_state_disk_bytes):
        sizes = ", ".join(map(formatting.size, status.slot_state_disk_bytes))
        facts.append(Text(f"state on the slots' local disks {sizes}", style="dim"))
    if status.tls != "off":
        own = "" if status.tls == "on" else f", with the certificate in {formatting.printable(status.tls)}"
        facts.append(Text(f"connections are encrypted by TLS{own}", style="dim"))
    if status.restarts or status.failures:
        line = Text(f"restarts {status.restarts}", style="yellow")
        if status.failures:
            last = status.failures[0]
            ago = formatting.span(max(0, status.now_ms - last.at_ms) / 1e3)
            line.append(f"  last failure {ago} ago", style="yellow")
            if shows_failures:
                line.append(": ", style="yellow")
                line.append(formatting.printable(last.summary), style="red")
        facts.append(line)
    if status.autoscale is not None:
        line = Text("autoscale: ", style="dim")
        facts.append(line.append(formatting.printable(status.autoscale.sentence), style="not dim"))
    facts += _user_metrics(status)
    facts += _unevenness(status)
    facts += [Text(line, style="yellow") for line in held_back_lines(status)]
    facts += [Text(formatting.printable(wait.sentence), style="yellow") for wait in status.waiting]
    facts += [
        Text(f"warning: {formatting.printable(warning)}", style="yellow") for warning in status.warnings[-WARNINGS_MAX:]
    ]
    return facts


def _user_metrics(status: JobStatus) -> list[Text]:
    """Return what users' functions have counted: a line for each operator that has counters or gauges."""
    names = names_shown(status)
    lines = []
    for operator in [operator for vertex in status.vertices for operator in vertex.operators]:
        shown = [f"{name} {formatting.figure(value)}" for name, value in operator.counters.items()]
        for name, gauge in operator.gauges.items():
            spread = (
                "" if gauge.min == gauge.max else f" ({formatting.figure(gauge.min)} to {formatting.figure(gauge.max)})"
            )
            shown.append(f"{name} {formatting.figure(gauge.sum)}{spread}")
        if shown:
            more = len(shown) - USER_METRICS_MAX
            shown = shown[:USER_METRICS_MAX] + ([f"{more} more (--json)"] if more > 0 else [])
            lines.append(
                Text(formatting.printable(f"metrics of {names[operator.uid]}: {', '.join(shown)}"), style="dim")
            )
    return lines


def _slot_sizes(status: JobStatus) -> list[str]:
    """Return the slots' sizes, with process ids if they are known, and hosts if there are several: to examine or kill
    one.
    """
    sizes = [formatting.size(used) for used in status.slot_memory_bytes]
    if len(sizes) != len(status.slot_pids):
        return sizes
    are_apart = len(set(status.slot_hosts)) > 1 and len(status.slot_hosts) == len(sizes)
    hosts = [f" on {formatting.printable(host)}" for host in status.slot_hosts] if are_apart else [""] * len(sizes)
    return [f"{size} (process {pid}{host})" for size, pid, host in zip(sizes, status.slot_pids, hosts, strict=True)]


def _checkpoints(status: JobStatus) -> list[Text]:
    if status.checkpoint_dir is None:
        return [Text("no checkpoints: the job has no checkpoint directory", style="dim")]
    line = Text("checkpoints ", style="dim")
    line.append(f"{status.checkpoints_completed} completed", style="not dim")
    if status.checkpoints_failed:
        line.append(f", {status.checkpoints_failed} failed", style="not dim yellow")
    last = status.last_checkpoint
    if last is not None:
        line.append("; last: ", style="dim")
        line.append(checkpoint_line(last), style="not dim")
        line.append(f", {formatting.span(max(0, status.now_ms - last.created_ms) / 1e3)} ago", style="not dim")
    holding = [each for vertex in status.vertices for each in vertex.operators if each.state_bytes]
    if holding:
        largest = max(holding, key=lambda each: each.state_bytes)
        line.append(f"; state {formatting.size(sum(each.state_bytes for each in holding))}", style="not dim")
        most = " most" if len(holding) > 1 else ""
        line.append(
            f",{most} in {formatting.printable(largest.name)} ({formatting.rows(largest.state_rows)} rows)", style="dim"
        )
    line.append(f"  in {formatting.printable(status.checkpoint_dir)}", style="dim")
    slow = [one for one in status.checkpoints if one.state == "in_progress" and one.duration_ms >= SLOW_MS]
    return [
        line,
        *(
            Text(f"checkpoint {one.id} has been in progress for {formatting.span(one.duration_ms / 1e3)}", "yellow")
            for one in slow
        ),
    ]


def checkpoint_line(checkpoint: CheckpointStatus) -> str:
    """Format a checkpoint, such as `3 (120 ms, 1.2 MiB)`, or why there is none."""
    if checkpoint.state == "completed":
        took = formatting.span(checkpoint.duration_ms / 1e3)
        in_flight = f", {formatting.size(checkpoint.in_flight_bytes)} in flight" if checkpoint.in_flight_bytes else ""
        waited = checkpoint.alignment_ms >= ALIGNMENT_MS
        aligned = f", aligned in {formatting.span(checkpoint.alignment_ms / 1e3)}" if waited else ""
        return f"{checkpoint.id} ({took}, {formatting.size(checkpoint.state_bytes)}{in_flight}{aligned})"
    state = checkpoint.state.replace("_", " ")
    reason = f": {formatting.printable(checkpoint.reason)}" if checkpoint.reason else ""
    return f"{checkpoint.id} {state}{reason}"


def jobs_table(statuses: Sequence[JobStatus]) -> RenderableType:
    """Return a table with one row per job, for `midstream list`, then their checkpoint directories, which distinguish
    equal names.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", collapse_padding=True)
    table.add_column("job", no_wrap=True)
    table.add_column("name", min_width=NAME_CELLS_MIN)
    table.add_column("state", no_wrap=True)
    for header in ("started", "slots", "rows read"):
        table.add_column(header, justify="right", no_wrap=True)
    for status in statuses:
        table.add_row(
            status.job_id,
            _Name(status.name, True, Text()),
            Text(status.state, style=STATE_STYLE.get(status.state, "cyan")),
            formatting.minute(status.started_ms),
            f"{status.slots}/{status.slots_needed}",
            formatting.rows(status.rows_read),
        )
    return Group(table, *(Text(f"{status.job_id} has {_history(status)}", style="dim") for status in statuses))


def _history(status: JobStatus) -> str:
    notes = [_counted(status.checkpoints_completed, "checkpoint")] if status.checkpoint_dir else []
    notes += [_counted(status.restarts, "restart")] if status.restarts or not notes else []
    place = (
        f" in {formatting.printable(status.checkpoint_dir)}"
        if status.checkpoint_dir
        else ", and no checkpoint directory"
    )
    return " and ".join(reversed(notes)) + place


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def _ends(status: JobStatus) -> list[OperatorStatus]:
    """Return the operators at which rows enter and leave: sources, and operators without consumers."""
    followed = {source for source, _, _ in status.edges}
    fed = {target for _, target, _ in status.edges}
    chains = [vertex for vertex in status.vertices if vertex.operators]
    return [
        *(vertex.operators[0] for vertex in chains if vertex.id not in fed),
        *(vertex.operators[-1] for vertex in chains if vertex.id not in followed),
    ]


def progress_line(status: JobStatus, rates: Rates) -> str:
    """Return the status in one line, for logs and pipes."""
    parts = [f"{formatting.clock(status.now_ms)} {formatting.printable(status.name)} {status.state}"]
    names = names_shown(status)
    for operator in _ends(status):
        if operator.rows_in or operator.rows_out:
            rate = rates.rows_per_s(operator.uid)
            speed = "" if rate is None else f" ({formatting.short(rate)}/s)"
            parts.append(
                f"{formatting.printable(names[operator.uid])} {formatting.rows(rows_handled(operator))} rows{speed}"
            )
    recovered = recovered_share(status.vertices)
    if recovered is not None:
        parts.append(f"recovering {_percent(recovered)}")
    marks = [v.watermark_us for v in status.vertices if v.watermark_us is not None]
    if marks:
        parts.append(f"watermark {formatting.watermark(min(marks))}")
    late_rows = sum(operator.late_rows for vertex in status.vertices for operator in vertex.operators)
    if late_rows:
        parts.append(f"dropped {formatting.rows(late_rows)} late rows")
    failed_rows = sum(operator.failed_rows for vertex in status.vertices for operator in vertex.operators)
    if failed_rows:
        parts.append(f"{formatting.rows(failed_rows)} rows failed")
    bad_records = sum(operator.bad_records for vertex in status.vertices for operator in vertex.operators)
    if bad_records:
        parts.append(f"dropped {formatting.rows(bad_records)} bad records")
    if status.last_checkpoint is not None:
        parts.append(f"checkpoint {checkpoint_line(status.last_checkpoint)}")
    if status.restarts:
        parts.append(f"restarts {status.restarts}")
    if status.waiting:
        parts.append(formatting.printable(status.waiting[0].sentence))
    return " | ".join(parts)
