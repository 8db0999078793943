"""The faults that strike a running job: each kind is a function of the run and of a number that chooses the victim.

A fault that finds nothing to strike does nothing. Each one that strikes is counted by its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from midstream.engine.protocol.messages import DoCheckpoint, DoRescale, DoStop, GetStatus
from midstream.simulation import storage_faults
from midstream.simulation.cluster import SimulatedCluster, SimulatedDriver
from midstream.simulation.disk import Disk
from midstream.simulation.fault_kinds import (
    AT_IT,
    BACKLOGGED,
    COMMIT_FROZEN,
    COMMITTING,
    DELETE_FAILS,
    DELETION_FROZEN,
    ENDING,
    IN_FLIGHT,
    IN_RECOVERY,
    KILL_ANOTHER,
    LEAVING,
    LOADS_FAIL,
    PARTLY_FINISHED,
    PUBLISH_LIES,
    RECOVERING,
    REQUESTS,
    SAVEPOINT_SLOW,
    STALLS,
    TAKEN_RECOVERING,
    UNREADABLE,
    Fault,
)
from midstream.simulation.network import SIM, stall
from midstream.simulation.recorded_rows import Outside, SimSource
from midstream.simulation.recoveries import Recoveries, gates_of, is_recovering
from midstream.simulation.simulated_slot import SimulatedSlot
from midstream.simulation.slot_ledger_sink import Calls
from midstream.simulation.trace import Kind
from midstream.simulation.world import World


class SavepointRequests(Protocol):
    def request(
        self, driver: SimulatedDriver, victim: int, *, stop: bool, fails: bool = False, slow_us: int = 0
    ) -> None:
        """Request a savepoint in a directory chosen by `victim`. `stop`: the job stops with it. `fails`: the disk there
        fails. `slow_us`: how long the disk there takes to write a file.
        """
        ...


class FaultTarget(Protocol):
    """The parts of a run that faults can reach."""

    world: World
    outside: Outside
    recoveries: Recoveries
    calls: Calls
    polls: int
    """The number of checks whether it is time to strike."""

    @property
    def has_checkpoints(self) -> bool: ...

    @property
    def cluster(self) -> SimulatedCluster: ...

    @property
    def sources(self) -> Mapping[str, SimSource]: ...

    @property
    def savepoints(self) -> SavepointRequests: ...

    @property
    def driver(self) -> SimulatedDriver: ...

    @property
    def disk(self) -> Disk: ...

    def give_up_driver(self) -> None:
        """Consider the driver dead, and start the job again."""
        ...

    def rewind(self, victim: int) -> None:
        """Let the next start rewind to an older checkpoint, or to the beginning."""
        ...


PARALLELISMS: Final = (1, 2, 3, 4, 2, 3, 1, 2, 5, 3, 4, 6, 1, 2, 7, 3, 8)
"""The parallelisms to which a running job is rescaled; mostly low ones, which are quick to run."""

WITH_IN_FLIGHT: Final = ("kill_slot", "stop", "kill_driver", "kill_slot", "rescale")
"""The faults and requests after which a job certainly recovers rows in flight."""
RECOVERY_US: Final = 40_000
"""The longest time for which recovery runs before a fault strikes."""
POLL_INTERVAL_US: Final = 500
POLLS_MAX: Final = 2_000

Strike = Callable[[FaultTarget, int], bool]


def strike(stage: FaultTarget, fault: Fault) -> bool:
    """Strike, and return whether there was something to strike."""
    world = stage.world
    if stage.driver.outcome is not None:
        return False
    struck = STRIKES[fault.kind](stage, fault.victim)
    if struck and fault.kind not in REQUESTS:
        stage.cluster.struck_us.append(world.now_us)
    if struck and world.trace is not None:
        world.trace.add(world.step_number, world.step_number, world.now_us, "", Kind.FAULT, fault.kind)
    return struck


def _kill_slot(stage: FaultTarget, victim: int) -> bool:
    slots = stage.cluster.live_slots
    if not slots:
        return False
    slots[victim % len(slots)].process.crash()
    return True


def _kill_slot_twice(stage: FaultTarget, victim: int) -> bool:
    """Kill a slot, and another one while the job recovers."""
    world = stage.world
    world.schedule(1 + victim % 50_000, None, Kind.FAULT, lambda: _kill_again(stage, victim), "a second slot is killed")
    return _kill_slot(stage, victim)


def _strikes_now(stage: FaultTarget) -> None:
    """Record that a fault which was prepared earlier strikes now: it may be the reason of later failures."""
    stage.cluster.struck_us.append(stage.world.now_us)


def _kill_again(stage: FaultTarget, victim: int) -> None:
    _strikes_now(stage)
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


def _long_call(stage: FaultTarget, victim: int) -> bool:
    """Keep a slot's loop in a function for less or more than the heartbeat timeout; a thread sends heartbeats
    meanwhile.
    """
    slots = [slot for slot in stage.cluster.live_slots if not slot.process.paused and slot.machine is not None]
    if not slots:
        return False
    slot = slots[victim % len(slots)]
    slot.calls_since_us = stage.world.now_us
    slot.process.pause()

    def comes_back() -> None:
        slot.calls_since_us = None
        slot.process.resume()

    delay_us = 5_000 if victim % 3 else 5_000_000
    stage.world.schedule(delay_us, None, Kind.FAULT, comes_back, f"the call in {slot.process.name} comes back")
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


def _stall(stage: FaultTarget, victim: int) -> bool:
    connections = stage.driver.connections.values()
    to_slots, to_driver = [each.to_slot for each in connections], [each.to_driver for each in connections]
    return stall([*to_slots, *to_driver, *stage.cluster.network.ends()], victim)


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


def _publish_hangs(stage: FaultTarget, victim: int) -> bool:
    """Let the next checkpoint's metadata be written late, often after it was given up; a slot may die before that."""
    world = stage.world
    longest_us = 3_000_000 if victim % 2 else 300_000

    def about_to_publish() -> None:
        _strikes_now(stage)
        if victim // 2 % 3 == 0:
            delay_us = 1 + victim // 7 % longest_us
            kill = lambda: _kill_again(stage, victim)  # noqa: E731 - as short as the others
            world.schedule(delay_us, None, Kind.FAULT, kill, "a slot is killed while metadata hangs")

    stage.disk.hangs_us["_metadata"] = 1_000 + victim // 5 % longest_us
    stage.disk.before_write.setdefault("_metadata", about_to_publish)
    return True


def _crash_at_publish(stage: FaultTarget, victim: int) -> bool:
    """Kill the driver, or a slot, around the moment at which the next checkpoint completes."""
    world = stage.world

    def crash() -> None:
        _strikes_now(stage)
        if victim % 3:
            stage.driver.process.crash()
        else:
            _kill_slot(stage, victim)

    def about_to_publish() -> None:
        world.schedule(victim % 5 * (1 + victim % 997), None, Kind.FAULT, crash, "crash around a publication")

    stage.disk.before_write["_metadata"] = about_to_publish
    return True


def _freeze_at_publish(stage: FaultTarget, victim: int) -> bool:
    """Stop the driver after it has checked the epochs and before it writes metadata; another driver takes over.

    The old one writes only after that.
    """
    world, disk, driver = stage.world, stage.disk, stage.driver
    if "_metadata" in disk.before_write:
        return False
    delay_us = 100_000 + victim % 1_000_000

    def about_to_publish() -> None:
        process = driver.process
        if world.writer is not process or process.paused or stage.driver is not driver:
            return
        _strikes_now(stage)
        process.pause()
        world.schedule(delay_us, None, Kind.FAULT, process.resume, f"{process.name} wakes up")
        disk.hangs_us["_metadata"] = delay_us
        stage.give_up_driver()

    disk.before_write["_metadata"] = about_to_publish
    return True


def _strike_unreadable(stage: FaultTarget, victim: int) -> bool:
    """Make one read of rows in flight fail, as soon as such rows are being recovered or a while later."""

    def another() -> None:
        _strikes_now(stage)
        stage.disk.failing_parts = 1

    _when(stage, lambda: is_recovering(stage.cluster.live_slots), victim // 7 % 1_000, another, "rows cannot be read")
    return True


def _user_error(stage: FaultTarget, victim: int) -> bool:
    sources = list(stage.sources.values())
    source = sources[victim % len(sources)]
    split = victim // 7 % len(source.rows)
    if not source.rows[split]:
        return False
    row, _ = source.rows_of(split, source.rows[split])[victim // 13 % source.rows[split]]
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


def _rewind(stage: FaultTarget, victim: int) -> bool:
    """End the job, and let it start again from an older checkpoint, from an older savepoint, or from the beginning."""
    if stage.cluster.drained:  # the drain has chosen where sources end, which a start that rewinds does not repeat
        return False
    stage.rewind(victim // 5)
    return (_cancel, _cancel, _kill_driver, _stop, _stop_driver)[victim % 5](stage, victim // 7)


def _read_fails(stage: FaultTarget, victim: int) -> bool:
    stage.outside.read_failures += 1
    return True


def _commit_fails(stage: FaultTarget, victim: int) -> bool:
    stage.outside.commit_failures += 1 + victim % 3
    return True


def _slot_leaves(stage: FaultTarget, victim: int) -> bool:
    """Drain the nodes of some slots: the driver is notified, and slots that still live a while later are killed."""
    driver, world = stage.driver, stage.world
    slots = [slot for slot in stage.cluster.live_slots if slot.driver is driver]
    if not slots or not driver.process.alive:
        return False
    first, count = victim % len(slots), (1, 1, 1, 2, len(slots))[victim // 3 % 5]
    grace_us = (2_000_000, 20_000 + victim % 200_000, 1 + victim % 20_000)[victim // 17 % 3]

    def leave(slot: SimulatedSlot) -> None:
        if slot.connection is not None:
            driver.message_checker.leaves(slot.connection.number)
        driver.shell.slot_leaving(slot.request, f"{SIM} its node is drained")

    def killed(slot: SimulatedSlot) -> None:
        if slot.process.alive:
            _strikes_now(stage)
            slot.process.crash()

    for slot in (slots * 2)[first : first + count]:
        driver.process.post(partial(leave, slot))
        world.schedule(grace_us, None, Kind.FAULT, partial(killed, slot), f"the node of {slot.process.name} is gone")
    return True


def _slot_fails(stage: FaultTarget, victim: int) -> bool:
    """Let the next request for a slot fail, and kill a slot, so that one is requested."""
    stage.cluster.slot_failures += 1
    return _kill_slot(stage, victim)


def _loads_fail(stage: FaultTarget, victim: int) -> bool:
    """Let the next slot that loads sinks to commit with fail to open the storage once, and kill a slot, so that one comes."""
    stage.cluster.load_failures = 1
    return _kill_slot(stage, victim)


def _cluster_gone(stage: FaultTarget, victim: int) -> bool:
    """End the cluster for good, with all slots: the job has to be started again."""
    if not stage.cluster.live_slots or not stage.driver.process.alive:
        return False
    stage.driver.lose_cluster(f"{SIM} the cluster has ended")
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


def _savepoint_fails(stage: FaultTarget, victim: int) -> bool:
    """Request a savepoint, or a stop with one, in a directory whose disk fails; the job must run on."""
    stage.savepoints.request(stage.driver, victim // 4, stop=victim % 4 > 0, fails=True)
    return True


def _savepoint_slow(stage: FaultTarget, victim: int) -> bool:
    """Request a savepoint in a slow directory; every other time, cancel the job while it is being copied there."""
    driver = stage.driver

    def cancel() -> None:
        if stage.driver is driver and driver.outcome is None:
            strike(stage, Fault(stage.world.step_number, "cancel", 0))

    stage.savepoints.request(driver, victim, stop=False, slow_us=1_000 + victim % 10_000)
    if victim % 2:
        copied = lambda: not driver.coordinator.savepoints.idle  # noqa: E731 - as for the others
        _when(stage, copied, victim // 7 % 10_000, cancel, "cancel while a savepoint is copied")
    return True


def _savepoint_struck(stage: FaultTarget, victim: int) -> bool:
    """Request a savepoint, and strike the job, or request something else, while it is claimed, made or copied."""
    _then(stage, victim, BESIDES)
    return (_savepoint, _stop_savepoint, _savepoint_fails)[victim // 5 % 3](stage, victim // 11)


def _rescale(stage: FaultTarget, victim: int) -> bool:
    stage.driver.request(DoRescale(PARALLELISMS[victim % len(PARALLELISMS)]))
    return True


def _rescale_struck(stage: FaultTarget, victim: int) -> bool:
    """Request a rescale, and strike the job, or request something else, soon afterwards."""
    _then(stage, victim, BESIDES)
    return _rescale(stage, victim // 11)


def _drain_struck(stage: FaultTarget, victim: int) -> bool:
    """Drain the job, and make it continue from a checkpoint that is made while its sources reach their end."""
    _then(stage, victim, ("kill_driver", "kill_driver", "stop_driver", "kill_slot", "cancel", "crash_at_publish"))
    return _drain(stage, victim)


def _then(stage: FaultTarget, victim: int, kinds: Sequence[str]) -> None:
    """Let one of these kinds strike as well, soon or some time later."""
    world = stage.world
    kind = kinds[victim // 7 % len(kinds)]

    def another() -> None:
        strike(stage, Fault(world.step_number, kind, victim // 3))

    world.schedule(1 << victim % 18, None, Kind.FAULT, another, f"{kind} on top of it")


def _slots_late(stage: FaultTarget, victim: int) -> bool:
    """Let the next requested slots come too late, and kill a slot or rescale the job, so that some are requested."""
    if stage.driver.state != "running":
        return False  # a job that has never run would give up
    stage.driver.slots_late += 1 + victim % 2
    return _rescale(stage, victim // 5) if victim % 3 else _kill_slot(stage, victim)


def _strike_backlogged(stage: FaultTarget, victim: int) -> bool:
    """Strike the job as soon as many elements are in flight."""
    waiting = 2 + victim // 7 % 30
    _strike_when(
        stage,
        victim,
        lambda: sum(len(c.queue) for gate in gates_of(stage.cluster.live_slots) for c in gate.channels) >= waiting,
    )
    return True


def _strike_in_flight(stage: FaultTarget, victim: int) -> bool:
    """Strike the job as soon as a checkpoint with rows in flight is complete."""
    before = stage.recoveries.in_flight
    _strike_when(stage, victim, lambda: stage.recoveries.in_flight > before, WITH_IN_FLIGHT)
    return True


def _strike_complete(count: Callable[[Recoveries], int]) -> Strike:
    """Kill the driver as soon as a checkpoint is complete that `count` counts."""

    def strike_complete(stage: FaultTarget, victim: int) -> bool:
        before = count(stage.recoveries)

        def another() -> None:
            if stage.driver.process.alive:  # another fault that waited for this may have killed it
                strike(stage, Fault(stage.world.step_number, "kill_driver", victim))

        _when(stage, lambda: count(stage.recoveries) > before, victim, another, "kill_driver")
        return True

    return strike_complete


def _strike_committing(stage: FaultTarget, victim: int) -> bool:
    """Strike the job as soon as a slot is in the middle of a commit; mostly that slot is the victim."""
    kinds = AT_IT if stage.has_checkpoints else AT_IT[: AT_IT.index("stop")]
    name = kinds[victim % len(kinds)]

    def another() -> None:
        at_it = stage.calls.victims
        if name == KILL_ANOTHER:
            at_it = [slot for slot in stage.cluster.live_slots if slot not in at_it]
        if name not in ("kill_slot", KILL_ANOTHER, "cut_control"):
            strike(stage, Fault(stage.world.step_number, name, victim // 3))
        elif at_it:
            _strikes_now(stage)
            slot = at_it[victim // 7 % len(at_it)]
            if name == "cut_control" and slot.connection is not None:
                slot.driver.connection_lost(slot.connection, f"{SIM} control connection reset")
            else:
                slot.process.crash()

    _when(stage, lambda: bool(stage.calls.victims), victim // 11 % 3 * 2_000, another, name)
    return True


def _strike_recovering(stage: FaultTarget, victim: int) -> bool:
    """Strike the job as soon as rows in flight are being recovered, or a while later."""
    _strike_when(stage, victim, lambda: is_recovering(stage.cluster.live_slots))
    return True


def _strike_when(
    stage: FaultTarget, victim: int, is_time: Callable[[], bool], names: Sequence[str] = IN_RECOVERY
) -> None:
    name = names[victim % len(names)]

    def another() -> None:
        strike(stage, Fault(stage.world.step_number, name, victim // 3))

    _when(stage, is_time, victim // 7 % RECOVERY_US, another, name)


def _when(
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
    "long_call": _long_call,
    "cut_link": _cut_connection,
    "cut_control": _cut_control,
    STALLS: _stall,
    "kill_driver": _kill_driver,
    "stop_driver": _stop_driver,
    "publish_fails": storage_faults.publish_fails,
    "publish_hangs": _publish_hangs,
    "crash_at_publish": _crash_at_publish,
    "freeze_at_publish": _freeze_at_publish,
    "storage_lies": storage_faults.storage_lies,
    PUBLISH_LIES: storage_faults.publish_lies,
    DELETE_FAILS: storage_faults.delete_fails,
    DELETION_FROZEN: storage_faults.freeze_at_deletion,
    UNREADABLE: _strike_unreadable,
    "write_fails": storage_faults.write_fails,
    "disk_full": storage_faults.disk_full,
    "slow_storage": storage_faults.slow_storage,
    "disk_gone": storage_faults.disk_gone,
    "user_error": _user_error,
    "open_fails": _open_fails,
    "read_fails": _read_fails,
    "commit_fails": _commit_fails,
    COMMIT_FROZEN: storage_faults.freeze_at_commit,
    "slot_fails": _slot_fails,
    LOADS_FAIL: _loads_fail,
    LEAVING: _slot_leaves,
    "cluster_gone": _cluster_gone,
    "stop": _stop,
    "drain": _drain,
    "checkpoint": _checkpoint,
    "cancel": _cancel,
    "go_back": _rewind,
    "rescale": _rescale,
    "rescale_struck": _rescale_struck,
    "drain_struck": _drain_struck,
    "slots_late": _slots_late,
    "savepoint": _savepoint,
    "stop_savepoint": _stop_savepoint,
    "savepoint_fails": _savepoint_fails,
    "savepoint_struck": _savepoint_struck,
    SAVEPOINT_SLOW: _savepoint_slow,
    BACKLOGGED: _strike_backlogged,
    IN_FLIGHT: _strike_in_flight,
    ENDING: _strike_complete(lambda recoveries: recoveries.ending),
    PARTLY_FINISHED: _strike_complete(lambda recoveries: recoveries.partly_finished),
    TAKEN_RECOVERING: _strike_complete(lambda recoveries: recoveries.checkpoints),
    COMMITTING: _strike_committing,
    RECOVERING: _strike_recovering,
}
OF_REGIONS: Final = (
    STALLS,
    PUBLISH_LIES,
    DELETE_FAILS,
    COMMIT_FROZEN,
    DELETION_FROZEN,
    UNREADABLE,
    SAVEPOINT_SLOW,
    LOADS_FAIL,
    ENDING,
    PARTLY_FINISHED,
    TAKEN_RECOVERING,
)
BESIDES: Final = tuple(name for name in STRIKES if not name.endswith("_struck") and name not in OF_REGIONS)
"""The kinds that may strike a job while it handles a request."""
