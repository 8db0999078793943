"""The scenario that a seed draws for a user's job, and the effect of each of its sides alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from random import Random
from typing import Final

from midstream.engine.core.error_rows import counted
from midstream.simulation.faults import IN_FLIGHT, RECOVERING, Fault
from midstream.simulation.world import Tempo

ALL_ROWS: Final = 1 << 20
"""More rows than any recorded source has."""

BATCHES: Final = (2, 3, 5, 5, 8, 8, 20)
"""The approximate number of batches into which the rows of a source are cut."""
FAULTS: Final = (
    "kill_slot",
    "kill_slot",
    "kill_slot_twice",
    "stop_slot",
    "cut_link",
    "cut_control",
    "kill_driver",
    "stop_driver",
    "publish_fails",
    "crash_at_publish",
    "write_fails",
    "user_error",
    "user_error",
    "read_fails",
    "commit_fails",
    "open_fails",
    "stop",
    "checkpoint",
    "slow_storage",
    "cancel",
    "rescale",
    "savepoint",
    "stop_savepoint",
    IN_FLIGHT,
    RECOVERING,
)
"""The faults of a job; usual ones occur more often."""
RESCALE_FAULTS: Final = frozenset(("rescale", IN_FLIGHT, RECOVERING))
"""The faults that may request another parallelism."""
DRAINED: Final = 0.1
"""The share of runs with faults that are drained."""
WORDS: Final = {
    "kill_slot": "a slot dies",
    "kill_slot_twice": "two slots die, one after the other",
    "stop_slot": "a slot hangs",
    "cut_link": "a connection between two slots breaks",
    "cut_control": "the connection between the driver and a slot breaks",
    "kill_driver": "the driver dies",
    "stop_driver": "the driver hangs and is replaced",
    "publish_fails": "a checkpoint cannot be written",
    "crash_at_publish": "the driver or a slot dies while a checkpoint is completed",
    "write_fails": "state cannot be written",
    "user_error": "a row cannot be read, once or twice",
    "read_fails": "the source cannot be read once",
    "commit_fails": "a sink does not answer",
    "open_fails": "a sink cannot be opened, and a slot dies",
    "stop": "the job is stopped and started again",
    "checkpoint": "a checkpoint is requested",
    "slow_storage": "the storage is slow",
    "drain": "the job is drained",
    "cancel": "the job is cancelled and started again",
    "rescale": "the job is rescaled",
    "savepoint": "a savepoint is requested",
    "stop_savepoint": "the job is stopped with a savepoint and resumes from it",
    IN_FLIGHT: "the job fails, is stopped or rescaled once rows in flight are in a checkpoint",
    RECOVERING: "the job fails, is stopped or rescaled while it recovers",
}
"""The description of each fault, for display."""
DRAIN_FAULTS: Final = ("checkpoint", "savepoint")
"""The faults of a drained job: after a failure it would be unknown how many rows it has read."""
KILLS: Final = ("kill_slot", "user_error", "kill_slot_twice", "kill_driver")


@dataclass(frozen=True, slots=True)
class Order:
    """Determines the order in which rows of different inputs, splits and subtasks reach an operator."""

    seed: int = 0
    tempo: Tempo = field(default_factory=Tempo)
    rates: tuple[float | None, ...] = ()
    """The rows per second of each source, in the order of the program; none or None: as fast as possible."""


@dataclass(frozen=True, slots=True)
class Cuts:
    """The batches into which rows are cut."""

    batch_rows: int = ALL_ROWS
    """The largest number of rows per read."""
    are_random: bool = False
    """Whether each batch has a random number of rows, from one to that."""


@dataclass(frozen=True, slots=True)
class Failures:
    """The faults of the job, and how checkpoints are taken meanwhile."""

    faults: tuple[Fault, ...] = ()
    interval_s: float = 0.002
    aligned_timeout_s: float | None = None
    pool_buffers: int = 1024
    buffer_bytes: int = 32768
    sink_rows: int = 0
    """Above 0: the number of rows that a sink takes before it pauses."""
    small_chunks: bool = False

    @property
    def drains(self) -> bool:
        """Whether the job is drained before it has read all rows."""
        return any(fault.kind == "drain" for fault in self.faults)


@dataclass(frozen=True, slots=True)
class Width:
    """The number of subtasks at the beginning, and after the job has stopped or its driver died."""

    first: int = 1
    then: int = 1


@dataclass(frozen=True, slots=True)
class Outer:
    """The values that functions see of the world outside of the job."""

    clock_s: float = 0.0
    """How much later than in the reference run the clock begins."""
    random: int = 0
    hash: int = 0


@dataclass(frozen=True, slots=True)
class JobScenario:
    """A scenario. Its defaults are those of the reference run; a seed draws each of its sides."""

    seed: int = -1
    order: Order = field(default_factory=Order)
    cuts: Cuts = field(default_factory=Cuts)
    failures: Failures = field(default_factory=Failures)
    width: Width = field(default_factory=Width)
    outer: Outer = field(default_factory=Outer)
    steps_max: int = 200_000

    def describe(self) -> str:
        """Describe, in one line for display, only what differs from the reference run."""
        parts = []
        if self.width != Width():
            then = "" if self.width.then == self.width.first else f", {self.width.then} after a restart"
            parts.append(f"parallelism {self.width.first}{then}")
        if self.cuts != Cuts():
            parts.append(
                f"batches of {'1 to ' * (self.cuts.are_random and self.cuts.batch_rows > 1)}{counted(self.cuts.batch_rows, 'row')}"
            )
        if self.order.rates and any(self.order.rates):
            rates = ", ".join("unlimited" if r is None else f"{r:g}" for r in self.order.rates)
            parts.append(f"sources at {rates} rows/s")
        elif self.order != Order():
            parts.append("other delays between tasks")
        if self.failures.faults:
            parts.append(
                ", then ".join(f"{WORDS[fault.kind]} (at step {fault.step})" for fault in self.failures.faults)
            )
        if self.failures.aligned_timeout_s is not None:
            parts.append("unaligned checkpoints")
        if self.failures.pool_buffers < 1024:
            parts.append("tight buffers")
        if self.outer.clock_s:
            parts.append("another time of day")
        if self.outer.random:
            parts.append("other random numbers")
        if self.outer.hash:
            parts.append("another hash() of strings")
        return "; ".join(parts) or "the reference run again"


REFERENCE: Final = JobScenario()
SIDES: Final = ("outer", "order", "cuts", "width", "failures")


def draw(seed: int, rows: Sequence[int], parallelisms: Sequence[int], may_rescale: bool) -> JobScenario:
    """Return the scenario of a seed, for a job whose sources have `rows` rows."""
    random = Random(f"job scenario {seed}")
    widths = (*parallelisms[:2], *parallelisms)  # mostly low ones, which are quick to run
    failures = draw_failures(random, may_rescale)
    return JobScenario(
        seed=seed,
        order=draw_order(random, len(rows), failures.drains),
        cuts=draw_cuts(random, max(rows)),
        failures=failures,
        width=Width(random.choice(widths), random.choice(widths)),
        outer=Outer(random.uniform(1, 1e7), 1 + random.randrange(1 << 30), 1 + random.randrange(1 << 30)),
    )


def draw_order(random: Random, sources: int, drains: bool) -> Order:
    """Draw an order. `drains`: rows must be emitted as soon as they are read, or their number would be unknown."""
    rates: tuple[float | None, ...] = ()
    if not drains and random.random() < 0.4:
        rates = tuple(random.choice((None, None, 2_000.0, 20_000.0)) for _ in range(sources))
    tempo = Tempo(
        mail_us=random.choice((5, 40, 400)),
        control_us=random.choice((50, 400, 2000)),
        data_us=random.choice((20, 200, 3000)),
        io_us=random.choice((100, 500, 2000)),
    )
    return Order(1 + random.randrange(1 << 30), tempo, rates)


def draw_cuts(random: Random, rows: int) -> Cuts:
    """Draw cuts. Batches cost time, so there are some dozens of them at most, and mostly few."""
    batches = random.choice(BATCHES)
    if random.random() < 0.6:
        return Cuts(max(1, 2 * rows // batches), are_random=True)
    return Cuts(max(1, rows // batches))


def draw_failures(random: Random, may_rescale: bool) -> Failures:
    """Draw failures, usually some. `may_rescale`: whether the job can run at any parallelism."""
    faults: tuple[Fault, ...] = ()
    if random.random() < 0.9:
        horizon = random.choice((150, 300, 800))
        drains = random.random() < DRAINED
        kinds = [kind for kind in DRAIN_FAULTS if drains] or [
            kind for kind in FAULTS if may_rescale or kind not in RESCALE_FAULTS
        ]
        drawn = [
            Fault(random.randrange(20, horizon), random.choice(kinds), random.randrange(1 << 20))
            for _ in range(random.choice((1, 1, 2, 3)))
        ]
        if random.random() < 0.5:
            drawn.append(Fault(random.randrange(60, horizon), random.choice(KILLS), random.randrange(1 << 20)))
        if drains:
            drawn = [fault for fault in drawn if fault.kind in DRAIN_FAULTS]
            drawn.append(Fault(random.randrange(40, horizon), "drain", 0))
        faults = tuple(sorted(drawn, key=lambda fault: fault.step))
    return Failures(
        faults,
        interval_s=random.choice((0.002, 0.005, 0.01)),
        aligned_timeout_s=random.choice((None, 0.0, 0.001)),
        pool_buffers=random.choice((0, 16, 1024)),
        buffer_bytes=random.choice((4096, 32768)),
        sink_rows=random.choice((0, 0, 0, 10)),
        small_chunks=random.random() < 0.1,
    )


def only(scenario: JobScenario, *sides: str) -> JobScenario:
    """Return the reference run with these sides of `scenario`."""
    return replace(REFERENCE, seed=scenario.seed, **{side: getattr(scenario, side) for side in sides})


def without(scenario: JobScenario, side: str) -> JobScenario:
    """Return the scenario with this side as in the reference run."""
    return replace(scenario, **{side: getattr(REFERENCE, side)})


def size(scenario: JobScenario) -> tuple[int, int]:
    """Return the number of sides that differ from the reference run, and of faults: what shrinking reduces."""
    differing = sum(getattr(scenario, entry.name) != getattr(REFERENCE, entry.name) for entry in fields(scenario))
    return differing, len(scenario.failures.faults)
