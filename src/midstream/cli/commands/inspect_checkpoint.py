"""The contents of a checkpoint, read from its files alone, without Spark and without the job's code."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.output import Answer, Exit
from midstream.engine.checkpoint.channel_state import channel_text, segment_bytes
from midstream.engine.checkpoint.channel_state_references import batches_of, each_once, left_bytes, segments_left
from midstream.engine.checkpoint.metadata import CheckpointMetadata, EdgeLayout, OperatorState
from midstream.engine.checkpoint.state_files import read_parts, verify_chunks
from midstream.engine.checkpoint.store import SAVEPOINT, check_records, checkpoint_path
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.urls import below
from midstream.engine.protocol.messages import ChannelState, PartHandle
from midstream.engine.worker.source_reader import SPLITS, splits_of
from midstream.runtime.storage.stored_checkpoint import open_checkpoint

SPLITS_SHOWN_MAX = 20
CHANNELS_SHOWN_MAX = 40


class PartReport(msgspec.Struct, frozen=True):
    name: str
    redistribute: str
    rows: int
    bytes: int
    chunks: int
    files: int


class OperatorReport(msgspec.Struct, frozen=True):
    uid: str
    name: str
    parallelism: int
    finished_subtasks: int
    parts: tuple[PartReport, ...]
    rows: int
    bytes: int
    files: int
    settings: tuple[str, ...]
    """The settings with which its state was made: a program with other settings cannot take it over."""


class SplitReport(msgspec.Struct, frozen=True):
    id: str
    offset: int


class SourceReport(msgspec.Struct, frozen=True):
    uid: str
    exhausted: bool
    """No more splits will be found."""
    splits_waiting: int
    splits_in_progress: tuple[SplitReport, ...]


class CommittablesReport(msgspec.Struct, frozen=True):
    uid: str
    name: str
    checkpoint_id: int
    count: int
    bytes: int


class ChannelReport(msgspec.Struct, frozen=True):
    """The rows in flight from one subtask to another."""

    producer: int
    consumer: int
    stored_by: str
    """The side that stored it. consumer: it had arrived; producer: it had not; both: part of it had."""
    rows: int
    batches: int
    bytes: int
    partial: bool
    """Whether some of it is no longer needed (it was consumed since, or belongs to other consumers, which may refer to
    it as well).
    """


class EdgeReport(msgspec.Struct, frozen=True):
    source: str
    """The uid of the last operator before the edge."""
    target: str
    partitioning: str
    rows: int
    batches: int
    bytes: int
    """The bytes; what several channels share is counted once."""
    channels: tuple[ChannelReport, ...]


class CheckpointReport(msgspec.Struct, frozen=True, kw_only=True):
    path: str
    savepoint: bool
    """Whether it holds everything to which it refers."""
    checkpoint_id: int
    job_name: str
    job_id: str
    epoch: int
    attempt: int
    created_ms: int
    completed_ms: int
    max_parallelism: int
    state_bytes: int
    files: int
    operators: tuple[OperatorReport, ...]
    sources: tuple[SourceReport, ...]
    committables: tuple[CommittablesReport, ...]
    in_flight: tuple[EdgeReport, ...]
    """The edges on which rows were in flight."""
    in_flight_rows: int
    in_flight_bytes: int
    verified_bytes: int
    problems: tuple[str, ...]
    """The parts that do not verify: empty for a checkpoint that can be restored."""


def inspect_checkpoint(where: str) -> Answer:
    """Inspect a checkpoint. `where`: a chk-N directory, its metadata file, or a job's checkpoint directory.

    Raises StorageError if there is no checkpoint or its metadata is damaged.
    """
    report = read_report(where)
    return Answer(report, report_view(report), Exit.BAD_INPUT if report.problems else Exit.OK)


def read_report(where: str) -> CheckpointReport:
    opened = open_checkpoint(where)
    return _report(opened.storage, opened.root, opened.metadata)


def _report(storage: Storage, root: str, metadata: CheckpointMetadata) -> CheckpointReport:
    path = checkpoint_path(metadata.checkpoint_id)
    problems = check_records(storage)
    verified = 0
    for operator in metadata.operators:
        try:
            verified += verify_chunks(storage, _handles(operator), f"{path}, operator {operator.name!r}")
        except StorageError as error:
            problems.append(str(error))
    seen: set[tuple[str, int]] = set()
    for state in metadata.channels:
        for segment in state.segments:
            place = segment.file, segment.offset
            if segment.file and place in seen:
                continue  # other consumers have it too
            seen.add(place)
            try:
                verified += segment_bytes(storage, segment, f"{path}, {channel_text(state)}").nbytes
            except StorageError as error:
                problems.append(str(error))
    in_flight = tuple(edge for layout in metadata.edges if (edge := _edge(metadata, layout)).channels)
    names = {operator.uid: operator for operator in metadata.operators}
    return CheckpointReport(
        path=below(root, path),
        savepoint=storage.exists(SAVEPOINT),
        checkpoint_id=metadata.checkpoint_id,
        job_name=metadata.job_name,
        job_id=metadata.job_id,
        epoch=metadata.epoch,
        attempt=metadata.attempt,
        created_ms=metadata.created_ms,
        completed_ms=metadata.completed_ms,
        max_parallelism=metadata.max_parallelism,
        state_bytes=metadata.state_bytes,
        files=len(metadata.files),
        operators=tuple(_operator(operator) for operator in metadata.operators),
        sources=tuple(
            SourceReport(
                source.uid,
                source.exhausted,
                len(source.pending),
                () if problems else tuple(_splits(storage, names.get(source.uid), metadata.max_parallelism)),
            )
            for source in metadata.sources
        ),
        committables=tuple(
            CommittablesReport(c.uid, c.name, c.checkpoint_id, len(c.items), sum(map(len, c.items)))
            for c in metadata.committables
        ),
        in_flight=in_flight,
        in_flight_rows=sum(edge.rows for edge in in_flight),
        in_flight_bytes=sum(edge.bytes for edge in in_flight),
        verified_bytes=verified,
        problems=tuple(problems),
    )


def _handles(operator: OperatorState) -> list[PartHandle]:
    return [part for subtask in operator.subtasks for part in subtask.parts]


def _operator(operator: OperatorState) -> OperatorReport:
    by_name: dict[str, list[PartHandle]] = {}
    for handle in _handles(operator):
        by_name.setdefault(handle.name, []).append(handle)
    parts = tuple(_part(name, handles) for name, handles in by_name.items())
    return OperatorReport(
        uid=operator.uid,
        name=operator.name,
        parallelism=operator.parallelism,
        finished_subtasks=len(operator.finished),
        parts=parts,
        rows=sum(part.rows for part in parts),
        bytes=sum(part.bytes for part in parts),
        settings=tuple(f"{what} {value}" for _, what, value in operator.settings),
        files=len({extent.file for handle in _handles(operator) for extent in handle.extents if extent.file}),
    )


def _part(name: str, handles: list[PartHandle]) -> PartReport:
    chunks = [chunk for handle in handles for chunk in handle.chunks]
    extents = [extent for handle in handles for extent in handle.extents]
    return PartReport(
        name=name,
        redistribute=handles[0].redistribute,
        rows=sum(chunk.live_rows for chunk in chunks),
        bytes=sum(chunk.stored_bytes for chunk in chunks),
        chunks=len(extents),
        files=len({extent.file for extent in extents if extent.file}),
    )


def _edge(metadata: CheckpointMetadata, edge: EdgeLayout) -> EdgeReport:
    states = [state for state in metadata.channels if state.edge == edge.id]
    of_channel: dict[tuple[int, int], list[ChannelState]] = {}
    for state in states:
        of_channel.setdefault((state.producer, state.consumer), []).append(state)
    rows, batches, size = _amount(each_once(states))
    return EdgeReport(
        source=metadata.vertices[edge.source].uids[-1],
        target=metadata.vertices[edge.target].uids[0],
        partitioning=edge.partitioning,
        rows=rows,
        batches=batches,
        bytes=size,
        channels=tuple(_channel(of_channel[channel]) for channel in sorted(of_channel)),
    )


def _channel(states: list[ChannelState]) -> ChannelReport:
    """Report a channel: it has a state of each end and, during a recovery, of each old channel that has become part of
    it.
    """
    stored_by = {"producer" if state.is_output else "consumer" for state in states}
    rows, batches, size = _amount(states)
    return ChannelReport(
        producer=states[0].producer,
        consumer=states[0].consumer,
        stored_by=stored_by.pop() if len(stored_by) == 1 else "both",
        rows=rows,
        batches=batches,
        bytes=size,
        partial=any(state.skip > 0 or state.key_groups is not None for state in states),
    )


def _amount(states: list[ChannelState]) -> tuple[int, int, int]:
    """Return the rows (including consumed ones of a partly consumed segment), batches and bytes that are left."""
    rows = sum(segment.rows for state in states for segment in segments_left(state))
    return rows, sum(batches_of(state) - state.skip for state in states), left_bytes(states)


def _splits(storage: Storage, operator: OperatorState | None, max_parallelism: int) -> Iterator[SplitReport]:
    """Yield the position of each reader."""
    if operator is None:
        return
    handles = [handle for handle in _handles(operator) if handle.name == SPLITS]
    parts = read_parts(storage, handles, range(max_parallelism), "inspect")
    for split in splits_of(parts[SPLITS]) if SPLITS in parts else ():
        yield SplitReport(split.id, split.offset)


# ---- for people ------------------------------------------------------------


def report_view(report: CheckpointReport) -> RenderableType:
    """Show the report as a table of operators, then sources, sinks, and problems."""
    what = f"{'savepoint' if report.savepoint else 'checkpoint'} {report.checkpoint_id}"
    took = formatting.span((report.completed_ms - report.created_ms) / 1e3)
    facts = Text(f"completed {formatting.moment(report.completed_ms * 1000)} UTC, took {took}", style="dim")
    facts.append(f"; epoch {report.epoch}, attempt {report.attempt}, max_parallelism {report.max_parallelism}")
    parts: list[RenderableType] = [headline(what, report.job_name, report.path), facts, _operators_table(report)]
    if report.in_flight:
        parts.append(_in_flight_table(report))
    parts += [
        Text(f"{formatting.printable(operator.uid)}: {formatting.printable(', '.join(operator.settings))}", style="dim")
        for operator in report.operators
        if operator.settings and operator.parts
    ]
    parts += [_source_line(source) for source in report.sources]
    parts += [
        Text(
            f"sink {formatting.printable(c.name)}: {c.count} prepared in checkpoint {c.checkpoint_id}, {formatting.size(c.bytes)}"
        )
        for c in report.committables
    ]
    parts += [Text(f"damaged: {formatting.printable(problem)}", style="bold red") for problem in report.problems]
    if not report.problems:
        parts.append(
            Text(
                f"verified: every checksum of {formatting.size(report.verified_bytes)} {_where(report.files)}", "green"
            )
        )
    return Group(*parts)


def headline(what: str, job_name: str, path: str) -> Rule:
    line = Text(what, style="bold")
    line.append(f"  of job {formatting.printable(job_name)}", style="not bold")
    line.append(f"  {path}", style="not bold dim")
    return Rule(line, align="left", style="dim")


def _where(files: int) -> str:
    """Describe where the state is; that of small checkpoints is in the metadata."""
    return f"in {files} {'file' if files == 1 else 'files'}" if files else "in the metadata"


def _operators_table(report: CheckpointReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("operator", "uid"):
        table.add_column(header, overflow="fold")
    table.add_column("×", justify="right")
    table.add_column("state", overflow="fold")
    table.add_column("moves", overflow="fold")
    for header in ("rows", "bytes", "chunks", "files"):
        table.add_column(header, justify="right", no_wrap=True)
    for operator in report.operators:
        name = Text(formatting.printable(operator.name), style="bold")
        if operator.finished_subtasks:
            name.append(f"  {operator.finished_subtasks} finished", style="not bold yellow")
        head: list[RenderableType] = [name, Text(formatting.printable(operator.uid), "dim"), str(operator.parallelism)]
        if not operator.parts:
            table.add_row(*head, Text("–", "dim"))
        for part in operator.parts:
            table.add_row(
                *head,
                formatting.printable(part.name),
                part.redistribute,
                formatting.rows(part.rows),
                formatting.size(part.bytes),
                str(part.chunks),
                str(part.files),
            )
            head = ["", "", ""]
    return table


def _in_flight_table(report: CheckpointReport) -> Table:
    """Return a table with a row per edge, and below it one per channel."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("in flight", overflow="fold")
    table.add_column("channel", no_wrap=True)
    table.add_column("stored by", no_wrap=True)
    for header in ("rows", "bytes", "batches"):
        table.add_column(header, justify="right", no_wrap=True)
    for edge in report.in_flight:
        name = Text(f"{formatting.printable(edge.source)} → {formatting.printable(edge.target)}", style="bold")
        name.append(f"  {edge.partitioning}", style="not bold dim")
        at_most = "≤ " if any(channel.partial for channel in edge.channels) else ""
        table.add_row(
            name, "", "", f"{at_most}{formatting.rows(edge.rows)}", formatting.size(edge.bytes), str(edge.batches)
        )
        for channel in edge.channels[:CHANNELS_SHOWN_MAX]:
            table.add_row(
                "",
                f"{channel.producer} → {channel.consumer}",
                channel.stored_by,
                f"{'≤ ' if channel.partial else ''}{formatting.rows(channel.rows)}",
                formatting.size(channel.bytes),
                str(channel.batches),
                style="dim",
            )
        if len(edge.channels) > CHANNELS_SHOWN_MAX:
            table.add_row("", f"and {len(edge.channels) - CHANNELS_SHOWN_MAX} more", style="dim")
    return table


def _source_line(source: SourceReport) -> Text:
    line = Text(f"source {formatting.printable(source.uid)}: ")
    line.append(f"{source.splits_waiting} splits waiting, {len(source.splits_in_progress)} being read")
    for split in source.splits_in_progress[:SPLITS_SHOWN_MAX]:
        line.append(f"\n  {formatting.printable(split.id)} at {split.offset:,}", style="dim")
    if len(source.splits_in_progress) > SPLITS_SHOWN_MAX:
        line.append(f"\n  and {len(source.splits_in_progress) - SPLITS_SHOWN_MAX} more", style="dim")
    line.append("\n  more may be found" if not source.exhausted else "\n  all of its input is known", style="dim")
    return line
