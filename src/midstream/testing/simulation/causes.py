"""Finds why a job's output differs, by experiments that each change one thing in the reference run.

The job is run with the output of every operator recorded as well, so the first operator whose rows differ can be
named. The source code of its functions (`code_hints`) then gives details.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from midstream.engine.core.config import duration_text
from midstream.engine.graph.logical_graph import LogicalGraph, Node
from midstream.engine.operators.watermarks import TimestampsOperator
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.testing.simulation.code_hints import MISTAKES, UNDECLARED, Clue, Habit, clues_of
from midstream.testing.simulation.job_scenario import REFERENCE, Cuts, JobScenario, Outer, draw, only
from midstream.testing.simulation.output_compare import Contract, differences
from midstream.testing.simulation.simulated_job import TAP, SimulatedJob, SourceLine, source_line_of
from midstream.testing.simulation.simulated_run import Ran, run_job
from midstream.testing.simulation.verdict import compared, reference_of

TRIES: Final = {"clock": 4, "random": 2, "hash": 2, "width": 12, "cuts": 12, "order": 12, "failures": 60}
"""The largest number of runs of each experiment."""

AGAIN: Final = "nothing"
CLOCKS: Final = (Habit.CLOCK, Habit.REAL_CLOCK)
BATCHES: Final = ("map_batches", "process_batches", "co_process_batches")
"""The kinds of operators whose functions take batches."""
SIDE_WORDS: Final = {
    "cuts": "where batches are cut",
    "order": "the speed of inputs and tasks",
    "width": "the parallelism",
    "failures": "the faults of the job",
}


class Cause(Enum):
    """The cause, and what to do about it."""

    RUN_TO_RUN = (
        "The result differs between two runs with the same input, the same batches and no failure. Something in the job "
        "changes from run to run: the clock, random numbers that cannot be simulated, the order of a set, or something "
        "outside of the job."
    )
    CLOCK = (
        "The result depends on the time of day: the clock of the computer (wall clock). After a failure rows are "
        "processed again, later. Take the time from a column of the row, or from ctx.watermark."
    )
    RANDOM = (
        "The result depends on random numbers. After a failure rows are processed again and draw other numbers. "
        "Derive the number from the row, for example random.Random(row['id'])."
    )
    HASH = (
        "The result depends on hash() of strings, which differs in every process (PYTHONHASHSEED). "
        "Use zlib.crc32(text.encode()) or hashlib."
    )
    SET = (
        "The result differs from process to process: it depends on the order in which a set of strings is iterated, "
        "or on hash() of strings (PYTHONHASHSEED). Iterate over sorted(the_set)."
    )
    INPUTS = (
        "The result depends on the order in which rows of two inputs (or of two parts of one input) meet. Rows from "
        "different inputs arrive in any order. Keep the row that came first in state until the other one has arrived, "
        "or let an event-time timer decide."
    )
    INPUTS_OR_TIMERS = (
        "The result depends on what has been processed when a row of another input (or of another part of one input), or an "
        "event-time timer, arrives. Rows from different inputs arrive in any order: keep the row that came first in state "
        "until the other one has arrived. And timers fire between two batches, when rows with a later time may have been "
        "processed: in on_timer(time), only count rows whose time is at or before `time`."
    )
    LATE = (
        "Rows are too late: they are dropped or not, depending on how far event time has advanced when they are read. The "
        "watermark strategy allows less disorder than the rows have. Allow more with a larger bound in with_watermarks(), or "
        "with allowed_lateness(), or read the side output of late rows."
    )
    UPDATES = (
        "A window with allowed_lateness fires again for rows that arrive after its end, and one with emit_every has early "
        "results, so its output is a stream of updates: how many there are depends on when rows arrive. Declare which rows replace which: "
        "--latest SINK=KEY,window_start compares only the last row of each key and window."
    )
    CUTS = (
        "The result depends on where batches are cut. The number of rows in a batch is arbitrary: it depends on how "
        "fast rows arrive. A batch function has to return the same for rows in one batch and in several; what belongs "
        "together across batches has to be in declared state. (Event time also moves only between two batches.)"
    )
    WATERMARKS = (
        "The result depends on how far event time has advanced when a row is processed: a function compares a row with "
        "ctx.watermark, or does something at each watermark. Watermarks advance between two batches, so which rows are late "
        "depends on where batches are cut, which depends on how fast rows arrive. Let a timer of event time decide, or "
        "allow more disorder with a larger bound in with_watermarks(). If late rows may be treated either way, simulate without them: "
        "give recorded rows that are never late (--rows SOURCE=FILE), or if only columns differ, --ignore SINK=COLUMN."
    )
    TIMERS = (
        "The result depends on which rows arrive before a timer of event time fires. Timers fire between two batches, when "
        "the watermark has passed them, so rows with a later time may have been processed by then: how many follows from "
        "where batches are cut. In on_timer(time), count only rows whose time is at or before `time`; keep the others, with "
        "their times, for later timers."
    )
    STATE = (
        "A function keeps state outside of its declared state. Such state is not in checkpoints: it is lost or "
        "duplicated when the job resumes after a failure, and each subtask has its own. Declare it in the class of a "
        "KeyedProcessFunction, after key_by(), such as: count = ValueState()."
    )
    EFFECT = (
        "A function has a side effect: it changes something outside of the job. After a failure rows are processed "
        "again, and so is that. Only what goes through a sink happens exactly once."
    )
    ORDER = (
        "The result depends on the order of rows of different keys, splits or subtasks, which is not guaranteed. If "
        "the sink gets a stream of updates, declare it: --latest SINK=KEY compares only the last row of each key."
    )
    FAILURES = (
        "The result differs only after failures, and no reason for it was found in the code of the functions. "
        "Something is kept outside of declared state, or midstream has a bug: please report it with the replay below."
    )
    COMBINED = (
        "The result differs only when several things come together, and no single one of them causes it: see the "
        "schedule below."
    )


@dataclass(slots=True)
class Diagnosis:
    cause: Cause
    suspect: SourceLine | None = None
    """The first operator whose rows differ."""
    clues: list[Clue] = field(default_factory=list)
    experiments: list[str] = field(default_factory=list)
    """The experiments, and their results."""

    def lines(self) -> list[str]:
        lines = [f"Why: {self.cause.value}"]
        if self.suspect is not None:
            lines.append(f"First seen after: {self.suspect}")
        lines += [f"Look at: {clue}" for clue in self.clues[:5]]
        return [*lines, *self.experiments]


@dataclass(slots=True)
class _Seen:
    scenario: JobScenario
    ran: Ran


class _Lab:
    """Makes experiments with one job."""

    def __init__(self, job: SimulatedJob, contracts: Mapping[str, Contract], parallelisms: Sequence[int]) -> None:
        self.job = job.tapped()
        self.contracts = contracts
        self.parallelisms = parallelisms
        self.source_lines = list(self.job.outputs.values())
        self.reference = run_job(self.job, REFERENCE)
        self.seen: dict[str, _Seen] = {}
        self.experiments: list[str] = []
        self.same: list[str] = []
        most = max(recorded.rows for recorded in job.inputs.values())
        self.cuts = Cuts(max(1, most // 6))
        """A few batches, so that something happens between them."""

    def differs(self, ran: Ran) -> bool:
        if ran.error or ran.engine_bugs:
            return bool(ran.error) and not self.reference.error
        if not ran.is_over:
            return False
        reference = reference_of(self.job, self.reference, ran)
        return bool(differences(reference.output, ran.output, compared(self.job), self.contracts))

    def vary(self, name: str, what: str, scenarios: Iterator[JobScenario]) -> bool:
        """Return whether one of the scenarios has another output."""
        for number, scenario in enumerate(scenarios, 1):
            ran = run_job(self.job, scenario)
            if self.differs(ran):
                self.seen[name] = _Seen(scenario, ran)
                when = "when the run is repeated" if what == AGAIN else f"when this alone is changed: {what}"
                self.experiments.append(f"Tried: the output differs {when} (on try {number}: {scenario.describe()})")
                return True
        if what != AGAIN:
            self.same.append(what)
        return False

    def descriptions(self) -> list[str]:
        """Return the experiments, and their results."""
        alone = "this alone" if len(self.same) == 1 else "one of these alone"
        same = [f"Tried: the output stays the same when {alone} is changed: {', '.join(self.same)}"]
        return [*(same if self.same else ()), *self.experiments]

    def sided(self, *sides: str) -> Iterator[JobScenario]:
        rows = [recorded.rows for recorded in self.job.inputs.values()]
        tries = max(TRIES[side] for side in sides)
        for seed in range(tries):
            scenario = only(draw(seed, rows, self.parallelisms, not self.job.has_own_parallelism), *sides)
            yield replace(scenario, cuts=self.cuts) if sides in (("width",), ("failures",)) else scenario

    def first_differing(self, seen: _Seen) -> Node | None:
        """Return the first operator, in the order of the program, whose rows differ."""
        reference = reference_of(self.job, self.reference, seen.ran)
        found = {
            d.source_line.uid for d in differences(reference.output, seen.ran.output, self.source_lines, self.contracts)
        }
        for node in self.job.logical.nodes:
            if any(f"{TAP}{node.uid}" == uid or uid.startswith(f"{TAP}{node.uid} ") for uid in found):
                return node
        return None

    def drops_rows(self, seen: _Seen) -> Node | None:
        """Return the window whose late rows differ from those of the reference run."""
        late = [
            source_line
            for source_line in self.source_lines
            if source_line.uid.startswith(TAP) and source_line.uid.endswith(" late")
        ]
        reference = reference_of(self.job, self.reference, seen.ran)
        for difference in differences(reference.output, seen.ran.output, late, {}):
            uid = difference.source_line.uid.removeprefix(TAP).removesuffix(" late")
            return self.job.node_of[uid]
        return None


def diagnose(
    job: SimulatedJob,
    contracts: Mapping[str, Contract],
    parallelisms: Sequence[int],
    failing: JobScenario,
    notify: Callable[[str], None] = lambda text: None,
) -> Diagnosis:
    """Find the cause. `failing`: a scenario in which the output differs."""
    lab = _Lab(job, contracts, parallelisms)
    steps = itertools.count(1)
    most = 1 + 3 + len(SIDE_WORDS)

    def trying(what: str) -> None:
        notify(f"looking for the cause (experiment {next(steps)} of at most {most}): {what}")

    trying("the reference run again")
    if lab.vary("again", AGAIN, iter([REFERENCE])):
        return _made(lab, lab.seen["again"], Cause.RUN_TO_RUN, MISTAKES)
    experiments: dict[str, tuple[str, Callable[[int], Outer], Cause, tuple[Habit, ...]]] = {
        "clock": ("the time of day", lambda n: Outer(clock_s=195_145.678 * n), Cause.CLOCK, CLOCKS),
        "random": ("random numbers", lambda n: Outer(random=n), Cause.RANDOM, (Habit.RANDOM, Habit.UNSIMULATED)),
        "hash": ("hash() of text", lambda n: Outer(hash=n), Cause.HASH, (Habit.HASH,)),
    }
    for name, (what, make, cause, habits) in experiments.items():
        trying(f"only {what}")
        if lab.vary(name, what, (replace(REFERENCE, outer=make(n)) for n in range(1, TRIES[name] + 1))):
            return _made(lab, lab.seen[name], cause, habits)
    for name, what in SIDE_WORDS.items():
        trying(f"only {what}")
        lab.vary(name, what, lab.sided(name))
        if name == "order" and lab.seen:
            break  # it differs without any failure and at parallelism 1
    found = _judged(lab, failing)
    if found.cause in (Cause.LATE, Cause.WATERMARKS):
        found.experiments[:0] = _bounds(job.logical)
    return found


def _judged(lab: _Lab, failing: JobScenario) -> Diagnosis:
    seen = lab.seen
    if not seen:
        for sides in (("order", "cuts"), ("width", "cuts"), ("width", "order", "cuts")):
            if lab.vary("order", " and ".join(SIDE_WORDS[side] for side in sides), lab.sided(*sides)):
                break
    if not seen:
        ran = run_job(lab.job, failing)
        if lab.differs(ran):
            seen["all"] = _Seen(failing, ran)
            cause = Cause.FAILURES if failing.failures.faults else Cause.COMBINED
            return _state_or(lab, seen["all"], cause)
        return Diagnosis(Cause.COMBINED, experiments=lab.descriptions())
    calm = seen.get("cuts") or seen.get("order")
    if calm is not None:
        return _of_order(lab, calm)
    wide = seen.get("width")
    if wide is not None:
        late = lab.drops_rows(wide)
        if late is not None:
            return _at(lab, late, Cause.LATE)
        return _state_or(lab, wide, Cause.ORDER)
    return _state_or(lab, seen["failures"], Cause.FAILURES)


def _state_or(lab: _Lab, seen: _Seen, other: Cause) -> Diagnosis:
    """Blame state outside of declared state, if the source code of the operator's functions shows some."""
    node = lab.first_differing(seen)
    clues = _clues(lab, node, UNDECLARED)
    if clues:
        return Diagnosis(Cause.STATE, _source_line(node), clues, lab.descriptions())
    if other is Cause.ORDER and node is not None and _meets(lab, node):
        other = Cause.INPUTS
    return Diagnosis(other, _source_line(node), _clues(lab, node, MISTAKES), lab.descriptions())


def _of_order(lab: _Lab, seen: _Seen) -> Diagnosis:
    """Diagnose a job that differs without any failure: by the order of rows, or by which rows share a batch."""
    late = lab.drops_rows(seen)
    if late is not None:
        return _at(lab, late, Cause.LATE)
    node = lab.first_differing(seen)
    undeclared = _clues(lab, node, UNDECLARED)
    if node is not None and isinstance(node.operator, WindowOperator) and node.operator.fires_again:
        return Diagnosis(Cause.UPDATES, source_line_of(node), [], lab.descriptions())
    if node is None:
        return Diagnosis(Cause.ORDER, None, [], lab.descriptions())
    takes_batches = node.kind in BATCHES
    timers = _clues(lab, node, (Habit.TIMER,))
    if len(node.inputs) > 1 and not takes_batches:
        cause = Cause.INPUTS_OR_TIMERS if timers else Cause.INPUTS
        return Diagnosis(cause, source_line_of(node), undeclared or timers, lab.descriptions())
    if undeclared and not takes_batches:
        return Diagnosis(Cause.STATE, source_line_of(node), undeclared, lab.descriptions())
    if takes_batches and "cuts" in lab.seen and not (len(node.inputs) > 1 and not _is_cut(lab)):
        return Diagnosis(Cause.CUTS, source_line_of(node), undeclared, lab.descriptions())
    if _meets(lab, node):
        cause = Cause.INPUTS_OR_TIMERS if timers else Cause.INPUTS
        return Diagnosis(cause, source_line_of(node), undeclared or timers, lab.descriptions())
    if "cuts" not in lab.seen or takes_batches:
        return Diagnosis(
            Cause.CUTS if "cuts" in lab.seen else Cause.ORDER, source_line_of(node), undeclared, lab.descriptions()
        )
    watermark_clues = _clues(lab, node, (Habit.WATERMARK,))
    cause = Cause.TIMERS if timers and not watermark_clues else Cause.WATERMARKS
    return Diagnosis(cause, source_line_of(node), undeclared or watermark_clues or timers, lab.descriptions())


def _is_cut(lab: _Lab) -> bool:
    """Whether the output depends on which rows share a batch, and not on the speed of inputs and tasks."""
    return "order" not in lab.seen


def _meets(lab: _Lab, node: Node) -> bool:
    """Whether rows of several inputs, or of several splits of one, meet here or upstream."""
    if len(node.inputs) > 1:
        return True
    if not node.inputs:
        return len(lab.job.inputs[str(node.uid)].splits) > 1
    return _meets(lab, lab.job.logical.nodes[node.inputs[0].node])


def _at(lab: _Lab, node: Node, cause: Cause) -> Diagnosis:
    return Diagnosis(cause, source_line_of(node), [], lab.descriptions())


def _made(lab: _Lab, seen: _Seen, cause: Cause, habits: tuple[Habit, ...]) -> Diagnosis:
    node = lab.first_differing(seen)
    clues = _clues(lab, node, habits) or [
        clue for other in lab.job.logical.nodes for clue in _clues(lab, other, habits)
    ]
    if cause is Cause.RUN_TO_RUN:
        kinds = {clue.habit for clue in clues}
        if kinds & set(CLOCKS):
            cause = Cause.CLOCK
        elif kinds & {Habit.RANDOM, Habit.UNSIMULATED}:
            cause = Cause.RANDOM
        elif kinds & set(UNDECLARED):
            cause = Cause.STATE
    return Diagnosis(cause, _source_line(node), clues, lab.descriptions())


def _bounds(logical: LogicalGraph) -> list[str]:
    """Describe how much disorder the program allows."""
    return [
        f"The bound of {source_line_of(node)} is {duration_text(node.operator.strategy.delay_us) if node.operator.strategy.delay_us else 0}"
        for node in logical.nodes
        if isinstance(node.operator, TimestampsOperator)
    ]


def _clues(lab: _Lab, node: Node | None, habits: tuple[Habit, ...]) -> list[Clue]:
    if node is None:
        return []
    return [clue for clue in clues_of(node, lab.job.logical) if clue.habit in habits]


def _source_line(node: Node | None) -> SourceLine | None:
    return None if node is None else source_line_of(node)


def all_clues(job: SimulatedJob) -> list[Clue]:
    """Return the clues in the functions of all operators, each once."""
    return list(dict.fromkeys(clue for node in job.logical.nodes for clue in clues_of(node, job.logical)))
