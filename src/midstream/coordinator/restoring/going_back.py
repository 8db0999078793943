"""Output that is newer than the checkpoint a job is to go on from: found, refused, kept, or taken back.

A job that goes on from an older checkpoint than its sinks have committed makes the rows in between
once more. That is never done without a word: whoever asks for it names the checkpoint, and says
whether the sinks take back what they have committed since, or keep it, so that it is there twice.

    ask the sinks what they have committed      before looking which checkpoint is the newest: a job
                                                that is still running completes first, commits then
    decide                                      refuses, or says what is to be done; changes nothing
    take back                                   once the newer checkpoints count no more

For the I/O pool.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from midstream.checkpoint.metadata import CheckpointMetadata
from midstream.coordinator.events import NewerOutput
from midstream.core.errors import ConfigError, MidstreamError
from midstream.graph.job_graph import JobGraph, OperatorSpec
from midstream.operators.sink import Output, Sink

Held = Mapping[str, tuple[tuple[int, bytes], ...]]
"""By the uid of a sink, what newer checkpoints hold for it, see `Output.held`."""

BEGINNING = 0
"""Older than any checkpoint."""


@dataclass(frozen=True, slots=True)
class Newer:
    """A sink with output that is newer, or may be."""

    spec: OperatorSpec
    output: Output
    committed: int
    is_certain: bool

    @property
    def sink(self) -> Sink:
        assert self.spec.sink is not None
        return self.spec.sink

    def __str__(self) -> str:
        perhaps = "" if self.is_certain else "perhaps (it cannot say) "
        return f"sink {self.spec.name!r} {perhaps}up to checkpoint {self.committed}"


@dataclass(frozen=True, slots=True)
class Decision:
    after: int
    newer: tuple[Newer, ...] = ()
    takes_back: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def newest_seen(self) -> int:
        """Ids of later checkpoints must be above it, or they could not be told from those that were gone back behind."""
        return max((newer.committed for newer in self.newer), default=0)


def transactional(graph: JobGraph) -> list[OperatorSpec]:
    """The sinks that commit."""
    specs = [spec for vertex in graph.vertices for spec in vertex.operators]
    return [spec for spec in specs if spec.sink is not None and spec.sink.is_transactional]


def ask_sinks(graph: JobGraph, jobs: frozenset[str], held: Held) -> dict[str, int | None]:
    """By uid, the newest checkpoint of these jobs that is committed; None where the sink cannot say."""
    answers: dict[str, int | None] = {}
    for spec in transactional(graph):
        assert spec.sink is not None
        try:
            answers[spec.uid] = spec.sink.newest_committed(Output(spec.uid, jobs, held.get(spec.uid, ())))
        except MidstreamError as error:
            raise type(error)(f"sink {spec.name!r}: looking for what it has committed: {error}") from error
    return answers


def decide(
    graph: JobGraph,
    jobs: frozenset[str],
    committed: Mapping[str, int | None],
    metadata: CheckpointMetadata | None,
    newest_known: int,
    *,
    held: Held,
    by_name: bool,
    what: NewerOutput | None,
) -> Decision:
    """What is to be done about output newer than `metadata` (None: than the beginning).

    `committed`: see `ask_sinks`. `newest_known`: the newest checkpoint in the directory. Raises
    ConfigError when there is some and nobody has said what is to become of it, or a sink cannot do it.
    """
    after = BEGINNING if metadata is None else metadata.checkpoint_id
    newer = []
    for spec in transactional(graph):
        said = committed[spec.uid]
        until = newest_known if said is None else said
        if until > after:
            newer.append(Newer(spec, Output(spec.uid, jobs, held.get(spec.uid, ())), until, said is not None))
    if not newer:
        return Decision(after, warnings=_shown_again(graph, after, newest_known))
    if metadata is None:
        raise ConfigError(
            f"there is no checkpoint to go on from, and yet there is output of this job: {_listed(newer)}. Has the checkpoint "
            "directory been emptied? Bring it back; or start over (--fresh, fresh=True) with other targets for the output"
        )
    if what is None or not by_name:
        raise ConfigError(_refusal(newer, after, by_name))
    if what == "keep":
        twice = (
            f"{newer} is kept, although the job goes on from checkpoint {after}: the rows in between will be there twice"
            for newer in newer
        )
        return Decision(after, tuple(newer), False, (*twice, *_shown_again(graph, after, newest_known)))
    for each in newer:
        problem = _why_not(each, after)
        if problem:
            raise ConfigError(
                f"sink {each.spec.name!r} cannot take back what it has committed after checkpoint {after}: {problem}. Nothing has "
                f"been changed. To go on from checkpoint {after} all the same, with these rows there twice: --newer-output keep"
            )
    back = (f"sink {each.spec.name!r} takes back what it has committed after checkpoint {after}" for each in newer)
    return Decision(after, tuple(newer), True, (*back, *_shown_again(graph, after, newest_known)))


def take_back(decision: Decision, metadata: CheckpointMetadata) -> None:
    """Raises what a sink raises; doing it again goes on where it ended."""
    for newer in decision.newer if decision.takes_back else ():
        kept = [item for entry in metadata.committables if entry.uid == newer.spec.uid for item in entry.items]
        try:
            newer.sink.take_back(newer.output, decision.after, kept)
        except MidstreamError as error:
            raise type(error)(
                f"sink {newer.spec.name!r}: taking back what it has committed after checkpoint {decision.after}: {error}; "
                "start again in the same way to go on with it"
            ) from error


def _why_not(newer: Newer, after: int) -> str:
    try:
        newer.sink.check_take_back(newer.output, after)
    except ConfigError as error:
        return str(error)
    return ""


def _refusal(newer: Iterable[Newer], after: int, by_name: bool) -> str:
    newer = tuple(newer)
    unable = "".join(
        f" (sink {each.spec.name!r} cannot: {problem})" for each in newer if (problem := _why_not(each, after))
    )
    start = "" if by_name else f"--from {after} "
    return (
        f"checkpoint {after} is older than what has been committed: {_listed(newer)}. Going on from it makes the rows in "
        f"between once more. Say what is to become of the newer output: {start}--newer-output take-back "
        f'(newer_output="take-back") has it removed{unable}; {start}--newer-output keep leaves it, and the rows are there '
        "twice" + ("; or go on from the newest checkpoint: --from latest" if by_name else "")
    )


def _listed(newer: Iterable[Newer]) -> str:
    return ", ".join(map(str, newer))


def _shown_again(graph: JobGraph, after: int, newest_known: int) -> tuple[str, ...]:
    """Sinks that show rows as they come get them again after any failure; here it is many at once."""
    if not BEGINNING < after < newest_known:
        return ()
    specs = [spec for vertex in graph.vertices for spec in vertex.operators if spec.sink is not None]
    immediate = [spec for spec in specs if spec not in transactional(graph)]
    return tuple(f"sink {spec.name!r} is given the rows since checkpoint {after} once more" for spec in immediate)
