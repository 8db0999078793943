"""What becomes of each state that the functions of a job declare, when the job resumes from a checkpoint.

A state is found by its name, or by the name that it had (`was`). It is restored as it is, converted, or refused; a state
that is declared no more is dropped, as are fields and columns, if that is allowed. Pure functions: the slots convert what
they restore, and get the form in which it was stored with the handles of its chunks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches

import msgspec

from midstream.engine.checkpoint.metadata import CheckpointMetadata, OperatorState
from midstream.engine.core.errors import ConfigError
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec
from midstream.engine.protocol.messages import OperatorSnapshot, PartHandle
from midstream.engine.state.declared_state import DeclaredState
from midstream.engine.state.state_parts import StoredForm
from midstream.engine.state.state_upgrade import decoded_form, upgrade_of
from midstream.engine.state.type_evolution import NoConversion


@dataclass(frozen=True, slots=True)
class StateFate:
    """What becomes of one state of one operator."""

    uid: str
    operator: str
    """The name of the operator."""
    what: str
    """Its kind and name, such as "value state 'seen'": as they are now or, if it is declared no more, as they were."""
    part: str = ""
    """Its part now; "" if it is declared no more."""
    stored_part: str = ""
    """Its part in the checkpoint; "" if it is new."""
    rows: int = 0
    """At least as many as the checkpoint has of it."""
    stored: StoredForm | None = None
    """How it was declared, if it is converted."""
    changes: tuple[str, ...] = ()
    """What is converted."""
    losses: tuple[str, ...] = ()
    """What is dropped, which has to be allowed; a state that is declared no more is lost as a whole."""
    refusal: str = ""
    """Why it cannot be restored."""

    @property
    def was(self) -> str:
        """The name of a state that is restored under another one; "" for others."""
        name = self.stored_part.partition(":")[2]
        return name if self.part and name != self.part.partition(":")[2] else ""


def state_fates(metadata: CheckpointMetadata, graph: JobGraph) -> tuple[StateFate, ...]:
    """Return what becomes of each state that the functions of `graph` declare, or of which the checkpoint has entries.

    Raises StorageError for damaged metadata.
    """
    old = {op.uid: op for op in metadata.operators}
    return tuple(
        fate for vertex in graph.vertices for spec in vertex.operators for fate in _fates(old.get(spec.uid), spec)
    )


def _fates(before: OperatorState | None, spec: OperatorSpec) -> Iterator[StateFate]:
    now = spec.operator.upgradable_states()
    if now is None or (before is not None and not before.settings):
        return
    then = {} if before is None else {part: (what, text) for part, what, text in before.settings if part}
    rows = {} if before is None else _rows_by_part(before)
    restored = set()
    for part, state in now.items():
        former = f"{state.kind}:{state.was}"
        stored = next((each for each in (part, former) if each in then), "")
        restored.add(stored)
        fate = StateFate(spec.uid, spec.name, _what(part), part, stored, rows.get(stored, 0))
        if before is not None and stored in rows:
            fate = _restored(fate, state, dict(before.forms).get(stored), then[stored][1])
        yield fate
    for part, (what, text) in then.items():
        if part in rows and part not in restored:
            kind, _, name = part.partition(":")
            new = [each.partition(":")[2] for each in now if each not in then and each.startswith(f"{kind}:")]
            close = get_close_matches(name, new, n=1)
            guess = f" (is it {kind} state {close[0]!r} now?)" if close else ""
            gone = f"it holds {what} ({text}), which it does not have now{guess}"
            yield StateFate(spec.uid, spec.name, what, "", part, rows[part], losses=(gone,))


def _restored(fate: StateFate, state: DeclaredState, form: bytes | None, then: str) -> StateFate:
    """Complete the fate of a state of which the checkpoint has entries. `then`: its type, for messages."""
    differs = f"{_what(fate.stored_part)} was {then}, now it is {state.type_text()}"
    if form is None:
        if then == state.type_text() and not (fate.was and state.migrate):
            return fate
        return replace(
            fate, refusal=f"{differs}; its type is not recorded in this checkpoint, so it cannot be converted"
        )
    name = fate.stored_part.partition(":")[2]
    found = upgrade_of(state, decoded_form(form, f"operator {fate.uid!r}, {fate.what}"), bool(fate.was))
    if isinstance(found, NoConversion):
        return replace(fate, refusal=f"{differs}; {found.reason}")
    stored = None if found.changes_nothing else StoredForm(name, form)
    return replace(fate, stored=stored, changes=found.changes, losses=found.losses)


def _rows_by_part(operator: OperatorState) -> dict[str, int]:
    """Return the parts of the subtasks that were still running, with their rows."""
    rows: dict[str, int] = {}
    for subtask in operator.running:
        for part in operator.subtasks[subtask].parts:
            rows[part.name] = rows.get(part.name, 0) + sum(chunk.live_rows for chunk in part.chunks)
    return rows


def _what(part: str) -> str:
    kind, _, name = part.partition(":")
    return f"{kind} state {name!r}"


def check_fates(fates: Sequence[StateFate], checkpoint_id: int, allow_dropped_state: bool) -> None:
    """Raise ConfigError for what cannot be restored, and for what is lost, unless that is allowed."""
    for fate in fates:
        problem = problem_of_fate(fate, checkpoint_id, allow_dropped_state)
        if problem:
            raise ConfigError(problem)


def problem_of_fate(fate: StateFate, checkpoint_id: int, allow_dropped_state: bool) -> str:
    """Describe why a state cannot be restored; "" if it can be, or may be lost."""
    where = f"operator {fate.operator!r} (uid {fate.uid!r}): in checkpoint {checkpoint_id}"
    if fate.refusal:
        return (
            f"{where} {fate.refusal}. Keep it as it was, or give the state another name, with which it begins empty (and use "
            "--allow-dropped-state)"
        )
    if not fate.losses or allow_dropped_state:
        return ""
    if fate.part:
        return (
            f"{where} {fate.what} has what would be lost: {'; '.join(fate.losses)}. Declare it as it was, convert it with "
            "migrate=, or allow this to be dropped (--allow-dropped-state)"
        )
    name = fate.stored_part.partition(":")[2]
    return (
        f"{where} {fate.losses[0]}. Declare it as it was or, under its new name, with was={name!r}; or allow it to be "
        "dropped (--allow-dropped-state)"
    )


def as_declared_now(operator: OperatorState, fates: Sequence[StateFate]) -> OperatorState:
    """Return the state of an operator by the parts that it has now, without those that are dropped."""
    changed = {
        fate.stored_part: fate
        for fate in fates
        if fate.uid == operator.uid and fate.stored_part and (fate.part != fate.stored_part or fate.stored is not None)
    }
    if not changed:
        return operator
    return msgspec.structs.replace(
        operator, subtasks=tuple(_snapshot(snapshot, changed) for snapshot in operator.subtasks)
    )


def _snapshot(snapshot: OperatorSnapshot, changed: Mapping[str, StateFate]) -> OperatorSnapshot:
    parts: list[PartHandle] = []
    for part in snapshot.parts:
        fate = changed.get(part.name)
        if fate is None:
            parts.append(part)
        elif fate.part:
            parts.append(msgspec.structs.replace(part, name=fate.part, stored=fate.stored))
    return msgspec.structs.replace(snapshot, parts=tuple(parts))
