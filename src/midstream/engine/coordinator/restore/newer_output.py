"""Output that is newer than the checkpoint from which a job resumes: found, refused, kept, or rolled back.

A job that resumes from an older checkpoint than its sinks have committed emits the rows in between once more. That
never happens silently: the user has to name the checkpoint, and to choose whether the sinks roll back what they have
committed since (`rollback`), or keep it, so that it is duplicated.

    find_committed      before the newest checkpoint is determined: a job that is still running completes a
                        checkpoint before it commits
    decide              refuses, or returns what must be done; changes nothing
    roll_back           once the newer checkpoints do not count any more

For the I/O pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from midstream.engine.checkpoint.metadata import CheckpointMetadata
from midstream.engine.checkpoint.store import LastStart
from midstream.engine.coordinator.events import JobPlan, NewerOutput
from midstream.engine.core.errors import ConfigError, MidstreamError
from midstream.engine.graph.job_graph import JobGraph, OperatorSpec
from midstream.engine.operators.sink_api import CommittedOutput, Sink

Held = Mapping[str, tuple[tuple[int, bytes], ...]]
"""What newer checkpoints hold for each sink, by its uid, see `CommittedOutput.held`."""

UNDER_WAY: Final = "a driver that was presumed dead may be committing it"
BEGINNING: Final = 0
"""An id that is lower than that of any checkpoint."""


@dataclass(frozen=True, slots=True)
class JobStart:
    """The checkpoint from which a job begins, and what is known about newer ones."""

    metadata: CheckpointMetadata | None
    """The metadata of the checkpoint. None: the job begins at the beginning."""
    elsewhere: str | None
    """The directory of the checkpoint, if it is not that of the job."""
    newest_known: int
    """The newest checkpoint in these directories, whether it can be used or not."""
    jobs: frozenset[str]
    """The ids of the starts that may have resumed from one another's checkpoints."""
    warnings: tuple[str, ...] = ()
    held: Held = field(default_factory=dict)
    """What the checkpoints that are newer than `metadata` hold for sinks."""
    starts_over: bool = False
    """Whether the job begins at the beginning although there may be completed checkpoints."""
    begun: LastStart | None = None
    """Where the last start began, if it has completed no checkpoint of its own."""
    leaves_usable: bool = False
    """Whether there are usable checkpoints newer than `metadata`, none of which shows that what it holds for sinks has
    been committed: see `shows_committed`.
    """


@dataclass(frozen=True, slots=True)
class SinkAhead:
    """A sink whose output is newer than the checkpoint, or may be."""

    spec: OperatorSpec
    output: CommittedOutput
    committed: int
    """The newest checkpoint of that output."""
    doubt: str = ""
    """Why it is uncertain whether it is committed."""

    @property
    def sink(self) -> Sink:
        assert self.spec.sink is not None
        return self.spec.sink

    def __str__(self) -> str:
        perhaps = f"possibly ({self.doubt}) " if self.doubt else ""
        return f"sink {self.spec.name!r} {perhaps}up to checkpoint {self.committed}"


@dataclass(frozen=True, slots=True)
class Decision:
    after: int
    newer: tuple[SinkAhead, ...] = ()
    rolls_back: bool = False
    warnings: tuple[str, ...] = ()
    counts_until: int | None = None
    """The newest of the earlier checkpoints that still counts; None: all of them."""

    @property
    def newest_seen(self) -> int:
        """The newest checkpoint whose output a sink has. The ids of later checkpoints must be higher, so that they
        differ from those of checkpoints that do not count any more.
        """
        return max((newer.committed for newer in self.newer), default=0)


def transactional(graph: JobGraph) -> list[OperatorSpec]:
    """Return the sinks that commit."""
    specs = [spec for vertex in graph.vertices for spec in vertex.operators]
    return [spec for spec in specs if spec.sink is not None and spec.sink.is_transactional]


def find_committed(graph: JobGraph, jobs: frozenset[str], held: Held) -> dict[str, int | None]:
    """Return, by uid, the newest checkpoint of these jobs that is committed; None if the sink cannot determine it."""
    answers: dict[str, int | None] = {}
    for spec in transactional(graph):
        assert spec.sink is not None
        try:
            answers[spec.uid] = spec.sink.newest_committed(CommittedOutput(spec.uid, jobs, held.get(spec.uid, ())))
        except MidstreamError as error:
            raise type(error)(f"sink {spec.name!r}: finding what it has committed: {error}") from error
    return answers


def decide(plan: JobPlan, start: JobStart, committed: Mapping[str, int | None]) -> Decision:
    """Decide what to do about output that is newer than the checkpoint from which the job begins.

    `committed`: see `find_committed`. Raises ConfigError if there is newer output and the user has not chosen what to
    do about it, or if a sink cannot do that.
    """
    graph, metadata = plan.graph, start.metadata
    after = BEGINNING if metadata is None else metadata.checkpoint_id
    newer = tuple(_newer(graph, start, after, committed))
    if not newer:
        return _beside_pending(graph, start, (), ())
    if metadata is None:
        raise ConfigError(
            f"there is no checkpoint to resume from, but there is output of this job: {_listed(newer)}. Has the checkpoint "
            "directory been emptied? Restore it; or start over (--fresh, fresh=True) with other targets for the output"
        )
    by_name = plan.restore is not None and plan.restore != "latest"
    again = _last_choice(start.begun, after, newer, by_name)
    what = plan.newer_output or again
    if what is None or not (by_name or what == again):
        raise ConfigError(_refusal(newer, after, by_name))
    if what == "keep":
        twice = (
            f"{newer} is kept, and the job resumes from checkpoint {after}: the rows after it will be duplicated"
            for newer in newer
        )
        return _beside_pending(graph, start, newer, tuple(twice))
    for each in newer:
        problem = _rollback_problem(each, after)
        if problem:
            raise ConfigError(
                f"sink {each.spec.name!r} cannot roll back what it has committed after checkpoint {after}: {problem}. Nothing has "
                f"been changed. To resume from checkpoint {after} anyway, with these rows duplicated: --newer-output keep"
            )
    back = (f"sink {each.spec.name!r} rolls back what it has committed after checkpoint {after}" for each in newer)
    return Decision(after, newer, True, (*back, *_shown_again(graph, after, start.newest_known)), after)


def _newer(graph: JobGraph, start: JobStart, after: int, committed: Mapping[str, int | None]) -> Iterator[SinkAhead]:
    """Yield the sinks with output that is newer than the checkpoint, or may become so.

    What a newer checkpoint holds may be in a commit that has begun: a driver that was presumed dead may be in the middle
    of it, and no epoch stops that. Nor is it known whether the last start had all sinks roll back such output. Those
    that cannot had none, or it would have been refused.
    """
    begun = start.begun
    had_until = begun.below - 1 if begun is not None and begun.newer_output == "rollback" else BEGINNING
    for spec in transactional(graph):
        assert spec.sink is not None
        if not spec.sink.output_lasts:
            continue
        known, held = committed[spec.uid], start.held.get(spec.uid, ())
        until = start.newest_known if known is None else known
        output = CommittedOutput(spec.uid, start.jobs, held)
        if until > after:
            yield SinkAhead(spec, output, until, "" if known is not None else "it cannot determine this")
        elif held:
            yield SinkAhead(spec, output, max(checkpoint_id for checkpoint_id, _ in held), UNDER_WAY)
        elif start.metadata is not None and had_until > after:
            had = SinkAhead(spec, output, had_until, UNDER_WAY)
            if not _rollback_problem(had, after):
                yield had


def _last_choice(begun: LastStart | None, after: int, newer: Iterable[SinkAhead], by_name: bool) -> NewerOutput | None:
    """Return what the last start chose for newer output, if it has completed nothing and its choice applies here.

    It applies to a start that repeats it. If the choice was to roll back, it also applies to a start from another
    checkpoint with nothing newer to remove: commits that are under way have to be stopped.
    """
    if begun is None:
        return None
    if not by_name and begun.source == after and all(each.committed < begun.below for each in newer):
        return begun.newer_output
    return "rollback" if begun.newer_output == "rollback" and all(n.doubt == UNDER_WAY for n in newer) else None


def _beside_pending(
    graph: JobGraph, start: JobStart, newer: tuple[SinkAhead, ...], warnings: tuple[str, ...]
) -> Decision:
    """Decide to roll nothing back, and to give up newer checkpoints if this start may commit something first.

    A newer checkpoint that did not resume from this one would count that output as its own because of the lower id, and
    the job would produce the same rows again from there. That a sink has committed output of this checkpoint or of a
    newer one proves nothing: it may be a part, or of another lineage.
    """
    metadata = start.metadata
    after = BEGINNING if metadata is None else metadata.checkpoint_id
    shown = _shown_again(graph, after, start.newest_known)
    lasting = {spec.uid for spec in transactional(graph) if spec.sink is not None and spec.sink.output_lasts}
    if metadata is None or not start.leaves_usable or lasting.isdisjoint(of.uid for of in metadata.committables):
        return Decision(after, newer, warnings=(*warnings, *shown))
    given_up = (
        f"checkpoints after {after} no longer count: what checkpoint {after} holds for sinks may be committed only now"
    )
    return Decision(after, newer, warnings=(*warnings, given_up, *shown), counts_until=after)


def roll_back(decision: Decision, metadata: CheckpointMetadata) -> None:
    """Have the sinks roll back newer output. Raises what a sink raises; a second call continues where it ended."""
    for newer in decision.newer if decision.rolls_back else ():
        kept = [item for entry in metadata.committables if entry.uid == newer.spec.uid for item in entry.items]
        try:
            newer.sink.roll_back(newer.output, decision.after, kept)
        except MidstreamError as error:
            raise type(error)(
                f"sink {newer.spec.name!r}: rolling back what it has committed after checkpoint {decision.after}: {error}; "
                "start again in the same way to continue"
            ) from error


def _rollback_problem(newer: SinkAhead, after: int) -> str:
    try:
        newer.sink.check_rollback(newer.output, after)
    except ConfigError as error:
        return str(error)
    return ""


def _refusal(newer: Iterable[SinkAhead], after: int, by_name: bool) -> str:
    newer = tuple(newer)
    unable = "".join(
        f" (sink {each.spec.name!r} cannot: {problem})" for each in newer if (problem := _rollback_problem(each, after))
    )
    start = "" if by_name else f"--from {after} "
    return (
        f"checkpoint {after} is older than what has been committed: {_listed(newer)}. Resuming from it produces the "
        f"rows in between again. Choose what to do with the newer output: {start}--newer-output rollback "
        f'(newer_output="rollback") removes it{unable}; {start}--newer-output keep leaves it, and these rows are '
        "duplicated" + ("; or resume from the newest checkpoint: --from latest" if by_name else "")
    )


def _listed(newer: Iterable[SinkAhead]) -> str:
    return ", ".join(map(str, newer))


def _shown_again(graph: JobGraph, after: int, newest_known: int) -> tuple[str, ...]:
    """Return a warning for each sink that does not commit: it gets rows again after every failure, but here many."""
    if not BEGINNING < after < newest_known:
        return ()
    specs = [spec for vertex in graph.vertices for spec in vertex.operators if spec.sink is not None]
    immediate = [spec for spec in specs if spec not in transactional(graph)]
    return tuple(f"sink {spec.name!r} receives the rows since checkpoint {after} again" for spec in immediate)
