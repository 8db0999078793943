"""Checks whether a changed program can restore the state of a checkpoint: what it lacks, and what it has changed.

These are pure functions. Every refusal names the operator and the old and new setting, before anything runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from midstream.engine.checkpoint.metadata import CheckpointMetadata, OperatorState
from midstream.engine.core.errors import ConfigError
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec
from midstream.engine.operators.base import KEY
from midstream.engine.protocol.messages import PartHandle


def dropped_state(metadata: CheckpointMetadata, graph: JobGraph, allowed: bool) -> tuple[str, ...]:
    """Return the uids with state that the graph does not have. Raises ConfigError unless dropping them is allowed."""
    present = {spec.uid for vertex in graph.vertices for spec in vertex.specs}
    sources = {vertex.source.uid for vertex in graph.vertices if vertex.source}
    with_state = {op.uid for op in metadata.operators if any(s.parts for s in op.subtasks)}
    with_state |= {position.uid for position in metadata.sources}
    with_state |= {entry.uid for entry in metadata.committables}
    changed = [position.uid for position in metadata.sources if position.uid in present - sources]
    if changed:
        raise ConfigError(
            f"{changed[0]!r} was a source in checkpoint {metadata.checkpoint_id} and is another operator now; "
            "give the new operator another uid"
        )
    sinks = {spec.uid for vertex in graph.vertices for spec in vertex.operators if spec.sink is not None}
    unsunk = [entry.uid for entry in metadata.committables if entry.uid in present - sinks]
    if unsunk:
        raise ConfigError(
            f"{unsunk[0]!r} was a sink in checkpoint {metadata.checkpoint_id}, with output to commit, and is another operator "
            "now; give the new operator another uid"
        )
    dropped = sorted(with_state - present)
    if dropped and not allowed:
        new = sorted(present - {op.uid for op in metadata.operators})
        listed = ", ".join(_describe_dropped(metadata, uid, new) for uid in dropped)
        raise ConfigError(
            f"checkpoint {metadata.checkpoint_id} has state of {listed}, which the job no longer has. "
            "Give an operator that uid to restore it, or allow the state to be dropped (--allow-dropped-state)"
        )
    return tuple(dropped)


def _describe_dropped(metadata: CheckpointMetadata, uid: str, new: list[str]) -> str:
    """Describe the state of a missing operator, and a uid that may have replaced its own."""
    operator = next((op for op in metadata.operators if op.uid == uid), None)
    name = operator.name if operator is not None else uid
    chunks = (
        {chunk.id: chunk for part in _parts_to_restore(operator) for chunk in part.chunks}
        if operator is not None
        else {}
    )
    size, rows = sum(c.stored_bytes for c in chunks.values()), sum(c.live_rows for c in chunks.values())
    what = [f"{size:,} bytes, {rows:,} rows"]
    if any(position.uid == uid for position in metadata.sources):
        what.append("the position of a source")
    if any(entry.uid == uid for entry in metadata.committables):
        what.append("output to commit")
    close = get_close_matches(uid, new, n=1)
    renamed = f"; was it renamed to {close[0]!r}?" if close else ""
    return f"{uid!r} ({name}: {', '.join(what)}{renamed})"


def check_settings(metadata: CheckpointMetadata, graph: JobGraph) -> None:
    """Raise ConfigError if state was made with other settings than the operator has now.

    The types of states that users declare are not among these settings: see `engine.checkpoint.changed_states`.
    """
    old = {op.uid: op for op in metadata.operators}
    for vertex in graph.vertices:
        for spec in vertex.operators:
            before = old.get(spec.uid)
            problem = "" if before is None else problem_of_settings(before, spec, metadata.checkpoint_id)
            if problem:
                raise ConfigError(problem)


def problem_of_settings(before: OperatorState, spec: OperatorSpec, checkpoint_id: int) -> str:
    """Describe the first setting of an operator with which its state cannot be restored; "" if there is none."""
    held = {part.name for part in _parts_to_restore(before)}
    now = spec.operator.state_settings()
    is_users = spec.operator.upgradable_states() is not None
    for part, what, was in before.settings:
        found = now.get(part, {}).get(what)
        if found == was or not held or (part and (is_users or part not in held)):
            continue
        where = f"operator {spec.name!r} (uid {spec.uid!r}): in checkpoint {checkpoint_id}"
        then, way_out = "its state cannot be read as that", ""
        if what.startswith(KEY):
            then = "its state would be mistaken for that of other keys"
            way_out = " (if only the name of the column has changed, rename it back before key_by())"
        return (
            f"{where} {what} was {was}, now it is {found}; {then}. Keep it as it was{way_out}, or give the "
            "operator a new uid, with which it begins without state (and use --allow-dropped-state)"
            if found is not None
            else f"{where} it holds {what} ({was}), which it does not have now. Declare it as it was, or give "
            "the operator a new uid, with which it begins without state (and use --allow-dropped-state)"
        )
    return ""


def _parts_to_restore(operator: OperatorState) -> Iterator[PartHandle]:
    """Yield the parts of the subtasks that were still running."""
    for i in operator.running:
        yield from operator.subtasks[i].parts
