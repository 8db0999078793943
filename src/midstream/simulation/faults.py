"""The faults that strike a running job: each kind is a function of the run and of a number that chooses the victim.

A fault that finds nothing to strike does nothing. These are the faults of users' jobs; the laboratory has more kinds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.protocol.messages import DoCheckpoint, DoRescale, DoStop, GetStatus
from midstream.simulation.cluster import SimulatedCluster, SimulatedDriver
from midstream.simulation.disk import Disk
from midstream.simulation.network import SIM
from midstream.simulation.outside import Outside, row_id
from midstream.simulation.simulated_slot import SimulatedSlot
from midstream.simulation.trace import Kind
from midstream.simulation.world import World

IN_RECOVERY: Final = (
    "kill_slot",
    "stop",
    "cut_link",
    "user_error",
    "stop",
    "kill_driver",
    "kill_slot_twice",
    "rescale",
    "disk_gone",
)
"""The kinds that strike a job while it recovers; after `stop` it continues at its other parallelism, if it has one."""
IN_FLIGHT: Final = "strike_in_flight"
"""A kind that waits until a checkpoint with rows in flight is complete."""
RECOVERING: Final = "strike_recovering"
"""A kind that waits until rows in flight are being recovered."""
REQUESTS: Final = frozenset(("stop", "drain", "checkpoint", "rescale", "savepoint", "stop_savepoint"))
"""The kinds that are requests and not faults: they do not excuse a failure."""
PARALLELISMS: Final = (1, 2, 3, 4, 2, 3, 1, 2, 5, 3, 4, 6, 1, 2, 7, 3, 8)
"""The parallelisms to which a running job is rescaled; mostly low ones, which are quick to run."""

WITH_IN_FLIGHT: Final = ("kill_slot", "stop", "kill_driver", "kill_slot", "rescale")
"""The faults and requests after which a job certainly recovers rows in flight."""
RECOVERY_US: Final = 40_000
"""The longest time for which recovery runs before a fault strikes."""
POLL_INTERVAL_US: Final = 500
POLLS_MAX: Final = 2_000


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that strikes right before step `step`. `victim` chooses among the possible victims of that moment."""

    step: int
    kind: str
    victim: int


class SavepointRequests(Protocol):
    def request(self, driver: SimulatedDriver, victim: int, *, stop: bool) -> None:
        """Request a savepoint in a directory chosen by `victim`. `stop`: the job stops with it."""
        ...


class SourceOfRows(Protocol):
    """A source whose split i has `rows[i]` rows."""

    @property
    def number(self) -> int: ...

    @property
    def rows(self) -> Sequence[int]: ...


class FaultTarget(Protocol):
    """The parts of a run that faults can reach."""

    world: World
    polls: int
    """The number of checks whether it is time to strike."""

    @property
    def outside(self) -> Outside: ...

    @property
    def in_flight_checkpoints(self) -> int:
        """The number of completed checkpoints with rows in flight."""
        ...

    @property
    def cluster(self) -> SimulatedCluster: ...

    @property
    def sources(self) -> Mapping[str, SourceOfRows]: ...

    @property
    def savepoints(self) -> SavepointRequests: ...

    @property
    def driver(self) -> SimulatedDriver: ...

    @property
    def disk(self) -> Disk: ...

    def give_up_driver(self) -> None:
        """Consider the driver dead, and start the job again."""
        ...


Strike = Callable[[FaultTarget, int], bool]


def strike(stage: FaultTarget, fault: Fault) -> bool:
    """Strike, and return whether there was something to strike."""
    return carry_out(stage, fault, partial(STRIKES[fault.kind], stage), is_request=fault.kind in REQUESTS)


def carry_out(stage: FaultTarget, fault: Fault, how: Callable[[int], bool], *, is_request: bool) -> bool:
    """Let a fault strike with `how`, which gets its victim, and record it; return whether there was something to strike."""
    world = stage.world
    if stage.driver.outcome is not None:
        return False
    struck = how(fault.victim)
    if struck and not is_request:
        stage.cluster.struck_us.append(world.now_us)
    if struck and world.trace is not None:
        world.trace.add(world.step_number, world.step_number, world.now_us, "", Kind.FAULT, fault.kind)
    return struck


def gates_of(slots: Iterable[SimulatedSlot]) -> Iterator[InputGate]:
    for slot in slots:
        if slot.machine is not None:
            for task in slot.machine.tasks.values():
                yield from task.gates


def is_recovering(slots: Iterable[SimulatedSlot]) -> bool:
    """Whether some task still has recovered rows to process."""
    return any(gate.recovered is not None and not gate.recovered.is_over for gate in gates_of(slots))


def _kill_slot(stage: FaultTarget, victim: int) -> bool:
    slots = stage.cluster.live_slots
    if not slots:
        return False
    slots[victim % len(slots)].process.crash()
    return True


def _kill_slot_twice(stage: FaultTarget, victim: int) -> bool:
    """Kill a slot, and another one while the job recovers."""
    world = stage.world
    world.schedule(1 + victim % 50_000, None, Kind.FAULT, lambda: kill_again(stage, victim), "a second slot is killed")
    return _kill_slot(stage, victim)


def strikes_now(stage: FaultTarget) -> None:
    """Record that a fault which was prepared earlier strikes now: it may be the reason of later failures."""
    stage.cluster.struck_us.append(stage.world.now_us)


def kill_again(stage: FaultTarget, victim: int) -> None:
    strikes_now(stage)
    _kill_slot(stage, victim // 7)


def _stop_slot(stage: FaultTarget, victim: int) -> bool:
    """Stop a slot, as SIGSTOP does, for less or more than the heartbeat timeout."""
    slots = [slot for slot in stage.cluster.live_slots if not slot.process.paused]
    if not slots:
        return False
    process = slots[victim % len(slots)].process
    process.pause()
    delay_us = 5_000 if victim % 3 else 5_000_000
    stage.world.schedule(delay_us, None, Kind.FAULT, process.resume, f"{process.name} continues")
    return True


def _cut_connection(stage: FaultTarget, victim: int) -> bool:
    connections = list(stage.cluster.network.connected.values())
    if not connections:
        return False
    stage.cluster.network.cut(connections[victim % len(connections)], f"{SIM} connection reset")
    return True


def _cut_control(stage: FaultTarget, victim: int) -> bool:
    connections = list(stage.driver.connections.values())
    if not connections:
        return False
    stage.driver.connection_lost(connections[victim % len(connections)], f"{SIM} control connection reset")
    return True


def _kill_driver(stage: FaultTarget, victim: int) -> bool:
    stage.driver.process.crash()
    return True


def _stop_driver(stage: FaultTarget, victim: int) -> bool:
    """Stop the driver, as SIGSTOP does: it is considered dead, the job is started again, and it resumes as a zombie.

    This strikes only a driver that has slots, and so leads the job: an earlier one might rightly become the leader when
    it resumes.
    """
    if not stage.driver.connections or stage.driver.process.paused:
        return False
    process = stage.driver.process
    process.pause()
    delay_us = 30_000 + victim % 3_000_000
    stage.world.schedule(delay_us, None, Kind.FAULT, process.resume, f"{process.name} wakes up")
    stage.give_up_driver()
    return True


def _crash_at_publish(stage: FaultTarget, victim: int) -> bool:
    """Kill the driver, or a slot, around the moment at which the next checkpoint completes."""
    world = stage.world

    def crash() -> None:
        strikes_now(stage)
        if victim % 3:
            stage.driver.process.crash()
        else:
            _kill_slot(stage, victim)

    def about_to_publish() -> None:
        world.schedule(victim % 5 * (1 + victim % 997), None, Kind.FAULT, crash, "crash around a publication")

    stage.disk.before_write["_metadata"] = about_to_publish
    return True


def _publish_fails(stage: FaultTarget, victim: int) -> bool:
    stage.disk.failing_names["_metadata"] = 1 + victim % 3
    return True


def _write_fails(stage: FaultTarget, victim: int) -> bool:
    first = stage.disk.writes + 1 + victim % 5
    stage.disk.failing_writes.update(range(first, first + 1 + victim % 3))
    return True


def _slow_storage(stage: FaultTarget, victim: int) -> bool:
    """Let everything on the I/O pools take fifty times as long for a while."""
    processes = [process for process in stage.world.processes if process.alive and process.io_us < 100_000]
    for process in processes:
        process.io_us *= 50

    def fast() -> None:
        for process in processes:
            process.io_us //= 50

    stage.world.schedule(1_000 + victim % 200_000, None, Kind.FAULT, fast, "storage is as fast as before")
    return True


def _disk_gone(stage: FaultTarget, victim: int) -> bool:
    """Refuse every operation of the disk for a while."""
    disk = stage.disk
    disk.is_gone = True

    def back() -> None:
        disk.is_gone = False

    stage.world.schedule(1_000 + victim % 30_000, None, Kind.FAULT, back, "the disk is back")
    return True


def _user_error(stage: FaultTarget, victim: int) -> bool:
    sources = list(stage.sources.values())
    source = sources[victim % len(sources)]
    split = victim // 7 % len(source.rows)
    if not source.rows[split]:
        return False
    row = row_id(source.number, split, victim // 13 % source.rows[split])
    stage.outside.poison[row] = 1 + victim % 2
    return True


def _open_fails(stage: FaultTarget, victim: int) -> bool:
    """Let the next operators that are opened raise, and kill a slot, so that operators are opened."""
    stage.outside.open_failures += 1 + victim % 3
    return _kill_slot(stage, victim)


def _cancel(stage: FaultTarget, victim: int) -> bool:
    """Cancel the job, like Ctrl-C, without a last checkpoint. It is started again from the newest one."""
    stage.driver.cancel(f"the user cancels the job {SIM}")
    return True


def _read_fails(stage: FaultTarget, victim: int) -> bool:
    stage.outside.read_failures += 1
    return True


def _commit_fails(stage: FaultTarget, victim: int) -> bool:
    stage.outside.commit_failures += 1 + victim % 3
    return True


def _stop(stage: FaultTarget, victim: int) -> bool:
    stage.driver.request(DoStop(drain=False))
    return True


def _drain(stage: FaultTarget, victim: int) -> bool:
    stage.driver.request(DoStop(drain=True))
    return True


def _checkpoint(stage: FaultTarget, victim: int) -> bool:
    stage.driver.request(DoCheckpoint())
    stage.driver.request(GetStatus())
    return True


def _savepoint(stage: FaultTarget, victim: int) -> bool:
    stage.savepoints.request(stage.driver, victim, stop=False)
    return True


def _stop_savepoint(stage: FaultTarget, victim: int) -> bool:
    """Stop the job with a savepoint, from which it then continues."""
    stage.savepoints.request(stage.driver, victim, stop=True)
    return True


def _rescale(stage: FaultTarget, victim: int) -> bool:
    stage.driver.request(DoRescale(PARALLELISMS[victim % len(PARALLELISMS)]))
    return True


def _strike_in_flight(stage: FaultTarget, victim: int) -> bool:
    """Strike the job as soon as a checkpoint with rows in flight is complete."""
    before = stage.in_flight_checkpoints
    strike_when(stage, victim, lambda: stage.in_flight_checkpoints > before, WITH_IN_FLIGHT)
    return True


def _strike_recovering(stage: FaultTarget, victim: int) -> bool:
    """Strike the job as soon as rows in flight are being recovered, or a while later."""
    strike_when(stage, victim, lambda: is_recovering(stage.cluster.live_slots))
    return True


def strike_when(
    stage: FaultTarget, victim: int, is_time: Callable[[], bool], names: Sequence[str] = IN_RECOVERY
) -> None:
    name = names[victim % len(names)]

    def another() -> None:
        strike(stage, Fault(stage.world.step_number, name, victim // 3))

    when(stage, is_time, victim // 7 % RECOVERY_US, another, name)


def when(
    stage: FaultTarget, is_time: Callable[[], bool], delay_us: int, another: Callable[[], None], name: str
) -> None:
    world = stage.world

    def poll(polls: int) -> None:
        stage.polls += 1
        if is_time():
            world.schedule(delay_us, None, Kind.FAULT, another, name)
        elif polls < POLLS_MAX:
            world.schedule(POLL_INTERVAL_US, None, Kind.FAULT, lambda: poll(polls + 1), "is it time to strike?")

    poll(0)


STRIKES: Final[Mapping[str, Strike]] = {
    "kill_slot": _kill_slot,
    "kill_slot_twice": _kill_slot_twice,
    "stop_slot": _stop_slot,
    "cut_link": _cut_connection,
    "cut_control": _cut_control,
    "kill_driver": _kill_driver,
    "stop_driver": _stop_driver,
    "publish_fails": _publish_fails,
    "crash_at_publish": _crash_at_publish,
    "write_fails": _write_fails,
    "slow_storage": _slow_storage,
    "disk_gone": _disk_gone,
    "user_error": _user_error,
    "open_fails": _open_fails,
    "read_fails": _read_fails,
    "commit_fails": _commit_fails,
    "stop": _stop,
    "drain": _drain,
    "checkpoint": _checkpoint,
    "cancel": _cancel,
    "rescale": _rescale,
    "savepoint": _savepoint,
    "stop_savepoint": _stop_savepoint,
    IN_FLIGHT: _strike_in_flight,
    RECOVERING: _strike_recovering,
}
