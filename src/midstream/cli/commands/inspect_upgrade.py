"""What becomes of a job's states when it resumes from a checkpoint, found without starting anything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Literal, assert_never

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.commands.inspect_checkpoint import headline
from midstream.cli.commands.run import load_with_its_own_logging
from midstream.cli.output import Answer, Exit
from midstream.engine.checkpoint.changed_states import StateFate, problem_of_fate, state_fates
from midstream.engine.checkpoint.compatibility import problem_of_settings
from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.redistribute_state import assign_state
from midstream.engine.checkpoint.store import checkpoint_path, load, split_restore
from midstream.engine.core.errors import ConfigError, MidstreamError
from midstream.engine.core.urls import below
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.engine.graph.job_graph import JobGraph
from midstream.runtime.storage.file_storage import FileStorage

Outcome = Literal["restored", "converted", "new", "dropped", "refused"]
_OWN: Final = "its state"
"""The state of an operator that midstream defines itself."""


class StateChange(msgspec.Struct, frozen=True):
    uid: str
    operator: str
    state: str
    """Its kind and name."""
    outcome: Outcome
    was: str = ""
    """The name that it has in the checkpoint, if that is another one."""
    rows: int = 0
    """At least as many rows as the checkpoint has of it."""
    changes: tuple[str, ...] = ()
    """What is converted."""
    losses: tuple[str, ...] = ()
    """What is dropped of a state that is restored."""
    refusal: str = ""
    """Why the job cannot resume there."""


class UpgradeReport(msgspec.Struct, frozen=True):
    """What becomes of each state when a job resumes from a checkpoint."""

    path: str
    """The path of the checkpoint."""
    job_name: str
    checkpoint_id: int
    ok: bool
    states: tuple[StateChange, ...]
    problem: str
    """Why the job cannot resume there; "" if it can."""


def inspect_upgrade(path: Path, where: str, allow: bool, checkpoint_dir: str | None, modules: list[str]) -> Answer:
    """Compare the states of the job in a file with those of a checkpoint.

    Raises MidstreamError if the job cannot be loaded, or the checkpoint cannot be read.
    """
    program = load_with_its_own_logging(path, modules).program
    root = checkpoint_dir or program.config.checkpoint_dir
    directory, which = split_restore(where, root or os.curdir)
    if directory is None and root is None:
        raise ConfigError(
            "the job has no checkpoint directory; give --checkpoint-dir, or the path of a checkpoint to --from"
        )
    directory = directory or root or os.curdir
    metadata = load(FileStorage(directory), program.config.name, which)
    graph = build_job_graph(program.graph, program.config)
    problem = ""
    try:
        assign_state(metadata, graph, allow)
    except MidstreamError as error:
        problem = str(error)
    report = UpgradeReport(
        path=below(directory, checkpoint_path(metadata.checkpoint_id)),
        job_name=metadata.job_name,
        checkpoint_id=metadata.checkpoint_id,
        ok=not problem,
        states=(*_states(metadata, graph, allow), *_of_other_operators(metadata, graph, allow)),
        problem=problem,
    )
    return Answer(report, _view(report), Exit.OK if report.ok else Exit.BAD_INPUT)


def _states(metadata: CheckpointMetadata, graph: JobGraph, allow: bool) -> Iterator[StateChange]:
    """Yield the states of users' functions."""
    for fate in state_fates(metadata, graph):
        refusal = problem_of_fate(fate, metadata.checkpoint_id, allow)
        yield StateChange(
            fate.uid,
            fate.operator,
            fate.what,
            "refused" if refusal else _outcome(fate),
            fate.was,
            fate.rows,
            fate.changes,
            fate.losses if fate.part else (),
            refusal,
        )


def _outcome(fate: StateFate) -> Outcome:
    if not fate.stored_part:
        return "new"
    if not fate.part:
        return "dropped"
    return "restored" if fate.stored is None else "converted"


def _of_other_operators(metadata: CheckpointMetadata, graph: JobGraph, allow: bool) -> Iterator[StateChange]:
    """Yield what is midstream's own, such as windows, and what the job has no operator for."""
    specs = {spec.uid: spec for vertex in graph.vertices for spec in vertex.operators}
    sources = {vertex.source.uid for vertex in graph.vertices if vertex.source is not None}
    for operator in metadata.operators:
        rows = sum(
            chunk.live_rows for i in operator.running for part in operator.subtasks[i].parts for chunk in part.chunks
        )
        spec = specs.get(operator.uid)
        if not rows or operator.uid in sources:
            continue
        if spec is None:
            refusal = "" if allow else "the job has no operator with this uid (--allow-dropped-state drops its state)"
            outcome: Outcome = "refused" if refusal else "dropped"
        else:
            refusal = problem_of_settings(operator, spec, metadata.checkpoint_id)
            if not refusal and spec.operator.upgradable_states() is not None:
                continue
            outcome = "refused" if refusal else "restored"
        yield StateChange(operator.uid, operator.name, _OWN, outcome, "", rows, refusal=refusal)


def _view(report: UpgradeReport) -> RenderableType:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for header in ("uid", "state"):
        table.add_column(header, overflow="fold")
    table.add_column("rows", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for state in report.states:
        uid, name = formatting.printable(state.uid), formatting.printable(state.state)
        table.add_row(Text(uid, "dim"), name, formatting.rows(state.rows), _what_happens(state))
    last = Text("the job can resume there", "green")
    if report.problem:
        last = Text(f"the job cannot resume there: {formatting.printable(report.problem)}", style="bold red")
    return Group(headline(f"checkpoint {report.checkpoint_id}", report.job_name, report.path), table, last)


def _what_happens(state: StateChange) -> Text:
    found = [f"renamed from {state.was}"] if state.was else []
    match state.outcome:
        case "refused":
            return Text("refused", style="bold red")
        case "new":
            return Text("new, starts empty")
        case "dropped":
            return Text("dropped", style="yellow")
        case "restored" | "converted":
            found += state.changes
        case _:
            assert_never(state.outcome)
    shown = Text(formatting.printable("; ".join(found) or "restored"))
    if state.losses:
        shown.append(f"; {formatting.printable('; '.join(state.losses))}", style="yellow")
    return shown
