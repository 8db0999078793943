"""The faults of the laboratory's own jobs, in addition to those of users' jobs (`midstream.simulation.faults`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from midstream.simulation import faults
from midstream.simulation.cluster import SimulatedDriver
from midstream.simulation.faults import (
    IN_FLIGHT,
    RECOVERING,
    Fault,
    FaultTarget,
    gates_of,
    is_recovering,
    kill_again,
    strike_when,
    strikes_now,
    when,
)
from midstream.simulation.network import SIM, stall
from midstream.simulation.simulated_slot import SimulatedSlot
from midstream.simulation.trace import Kind
from midstream_lab import storage_faults
from midstream_lab.fault_kinds import (
    AT_IT,
    BACKLOGGED,
    COMMIT_FROZEN,
    COMMITTING,
    DELETE_FAILS,
    DELETION_FROZEN,
    ENDING,
    KILL_ANOTHER,
    LEAVING,
    LOADS_FAIL,
    PARTLY_FINISHED,
    PUBLISH_LIES,
    REQUESTS,
    ROLLBACK_FROZEN,
    SAVEPOINT_SLOW,
    STALLS,
    TAKEN_RECOVERING,
    UNREADABLE,
)
from midstream_lab.faulty_disk import FaultyDisk
from midstream_lab.recoveries import Recoveries
from midstream_lab.slot_ledger_sink import Calls


class SavepointRequests(Protocol):
    def request(
        self, driver: SimulatedDriver, victim: int, *, stop: bool, fails: bool = False, slow_us: int = 0
    ) -> None:
        """Request a savepoint as the faults of users' jobs do. `fails`: the disk there fails. `slow_us`: how long the disk
        there takes to write a file.
        """
        ...


class LabTarget(FaultTarget, Protocol):
    """The parts of a run that faults can reach."""

    recoveries: Recoveries
    calls: Calls

    @property
    def has_checkpoints(self) -> bool: ...

    @property
    def disk(self) -> FaultyDisk: ...

    @property
    def savepoints(self) -> SavepointRequests: ...

    def rewind(self, victim: int) -> None:
        """Let the next start rewind to an older checkpoint, or to the beginning."""
        ...


LabStrike = Callable[[LabTarget, int], bool]


def strike(stage: LabTarget, fault: Fault) -> bool:
    """Strike, and return whether there was something to strike."""
    how = partial(STRIKES[fault.kind], stage)
    return faults.carry_out(stage, fault, how, is_request=fault.kind in REQUESTS)


def _long_call(stage: LabTarget, victim: int) -> bool:
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


def _stall(stage: LabTarget, victim: int) -> bool:
    connections = stage.driver.connections.values()
    to_slots, to_driver = [each.to_slot for each in connections], [each.to_driver for each in connections]
    return stall([*to_slots, *to_driver, *stage.cluster.network.ends()], victim)


def _publish_hangs(stage: LabTarget, victim: int) -> bool:
    """Let the next checkpoint's metadata be written late, often after it was given up; a slot may die before that."""
    world = stage.world
    longest_us = 3_000_000 if victim % 2 else 300_000

    def about_to_publish() -> None:
        strikes_now(stage)
        if victim // 2 % 3 == 0:
            delay_us = 1 + victim // 7 % longest_us
            kill = lambda: kill_again(stage, victim)  # noqa: E731 - as short as the others
            world.schedule(delay_us, None, Kind.FAULT, kill, "a slot is killed while metadata hangs")

    stage.disk.hangs_us["_metadata"] = 1_000 + victim // 5 % longest_us
    stage.disk.before_write.setdefault("_metadata", about_to_publish)
    return True


def _freeze_at_publish(stage: LabTarget, victim: int) -> bool:
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
        strikes_now(stage)
        process.pause()
        world.schedule(delay_us, None, Kind.FAULT, process.resume, f"{process.name} wakes up")
        disk.hangs_us["_metadata"] = delay_us
        stage.give_up_driver()

    disk.before_write["_metadata"] = about_to_publish
    return True


def _strike_unreadable(stage: LabTarget, victim: int) -> bool:
    """Make one read of rows in flight fail, as soon as such rows are being recovered or a while later."""

    def another() -> None:
        strikes_now(stage)
        stage.disk.failing_parts = 1

    when(stage, lambda: is_recovering(stage.cluster.live_slots), victim // 7 % 1_000, another, "rows cannot be read")
    return True


def _rewind(stage: LabTarget, victim: int) -> bool:
    """End the job, and let it start again from an older checkpoint, from an older savepoint, or from the beginning."""
    if stage.cluster.drained:  # the drain has chosen where sources end, which a start that rewinds does not repeat
        return False
    stage.rewind(victim // 5)
    kind = ("cancel", "cancel", "kill_driver", "stop", "stop_driver")[victim % 5]
    return STRIKES[kind](stage, victim // 7)


def _slot_leaves(stage: LabTarget, victim: int) -> bool:
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
            strikes_now(stage)
            slot.process.crash()

    for slot in (slots * 2)[first : first + count]:
        driver.process.post(partial(leave, slot))
        world.schedule(grace_us, None, Kind.FAULT, partial(killed, slot), f"the node of {slot.process.name} is gone")
    return True


def _slot_fails(stage: LabTarget, victim: int) -> bool:
    """Let the next request for a slot fail, and kill a slot, so that one is requested."""
    stage.cluster.slot_failures += 1
    return STRIKES["kill_slot"](stage, victim)


def _loads_fail(stage: LabTarget, victim: int) -> bool:
    """Let the next slot that loads sinks to commit with fail to open the storage once, and kill a slot, so that one comes."""
    stage.cluster.load_failures = 1
    return STRIKES["kill_slot"](stage, victim)


def _cluster_gone(stage: LabTarget, victim: int) -> bool:
    """End the cluster for good, with all slots: the job has to be started again."""
    if not stage.cluster.live_slots or not stage.driver.process.alive:
        return False
    stage.driver.lose_cluster(f"{SIM} the cluster has ended")
    return True


def _savepoint_fails(stage: LabTarget, victim: int) -> bool:
    """Request a savepoint, or a stop with one, in a directory whose disk fails; the job must run on."""
    stage.savepoints.request(stage.driver, victim // 4, stop=victim % 4 > 0, fails=True)
    return True


def _savepoint_slow(stage: LabTarget, victim: int) -> bool:
    """Request a savepoint in a slow directory; every other time, cancel the job while it is being copied there."""
    driver = stage.driver

    def cancel() -> None:
        if stage.driver is driver and driver.outcome is None:
            strike(stage, Fault(stage.world.step_number, "cancel", 0))

    stage.savepoints.request(driver, victim, stop=False, slow_us=1_000 + victim % 10_000)
    if victim % 2:
        copied = lambda: not driver.coordinator.savepoints.idle  # noqa: E731 - as for the others
        when(stage, copied, victim // 7 % 10_000, cancel, "cancel while a savepoint is copied")
    return True


def _savepoint_struck(stage: LabTarget, victim: int) -> bool:
    """Request a savepoint, and strike the job, or request something else, while it is claimed, made or copied."""
    _then(stage, victim, BESIDES)
    kind = ("savepoint", "stop_savepoint", "savepoint_fails")[victim // 5 % 3]
    return STRIKES[kind](stage, victim // 11)


def _rescale_struck(stage: LabTarget, victim: int) -> bool:
    """Request a rescale, and strike the job, or request something else, soon afterwards."""
    _then(stage, victim, BESIDES)
    return STRIKES["rescale"](stage, victim // 11)


def _drain_struck(stage: LabTarget, victim: int) -> bool:
    """Drain the job, and make it continue from a checkpoint that is made while its sources reach their end."""
    _then(stage, victim, ("kill_driver", "kill_driver", "stop_driver", "kill_slot", "cancel", "crash_at_publish"))
    return STRIKES["drain"](stage, victim)


def _then(stage: LabTarget, victim: int, kinds: Sequence[str]) -> None:
    """Let one of these kinds strike as well, soon or some time later."""
    world = stage.world
    kind = kinds[victim // 7 % len(kinds)]

    def another() -> None:
        strike(stage, Fault(world.step_number, kind, victim // 3))

    world.schedule(1 << victim % 18, None, Kind.FAULT, another, f"{kind} on top of it")


def _slots_late(stage: LabTarget, victim: int) -> bool:
    """Let the next requested slots come too late, and kill a slot or rescale the job, so that some are requested."""
    if stage.driver.state != "running":
        return False  # a job that has never run would give up
    stage.driver.slots_late += 1 + victim % 2
    return STRIKES["rescale"](stage, victim // 5) if victim % 3 else STRIKES["kill_slot"](stage, victim)


def _strike_backlogged(stage: LabTarget, victim: int) -> bool:
    """Strike the job as soon as many elements are in flight."""
    waiting = 2 + victim // 7 % 30
    strike_when(
        stage,
        victim,
        lambda: sum(len(c.queue) for gate in gates_of(stage.cluster.live_slots) for c in gate.channels) >= waiting,
    )
    return True


def _strike_complete(count: Callable[[Recoveries], int]) -> LabStrike:
    """Kill the driver as soon as a checkpoint is complete that `count` counts."""

    def strike_complete(stage: LabTarget, victim: int) -> bool:
        before = count(stage.recoveries)

        def another() -> None:
            if stage.driver.process.alive:  # another fault that waited for this may have killed it
                strike(stage, Fault(stage.world.step_number, "kill_driver", victim))

        when(stage, lambda: count(stage.recoveries) > before, victim, another, "kill_driver")
        return True

    return strike_complete


def _strike_committing(stage: LabTarget, victim: int) -> bool:
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
            strikes_now(stage)
            slot = at_it[victim // 7 % len(at_it)]
            if name == "cut_control" and slot.connection is not None:
                slot.driver.connection_lost(slot.connection, f"{SIM} control connection reset")
            else:
                slot.process.crash()

    when(stage, lambda: bool(stage.calls.victims), victim // 11 % 3 * 2_000, another, name)
    return True


STRIKES: Final[Mapping[str, LabStrike]] = {
    **faults.STRIKES,
    "long_call": _long_call,
    STALLS: _stall,
    "publish_hangs": _publish_hangs,
    "freeze_at_publish": _freeze_at_publish,
    "storage_lies": storage_faults.storage_lies,
    PUBLISH_LIES: storage_faults.publish_lies,
    DELETE_FAILS: storage_faults.delete_fails,
    DELETION_FROZEN: storage_faults.freeze_at_deletion,
    UNREADABLE: _strike_unreadable,
    "disk_full": storage_faults.disk_full,
    COMMIT_FROZEN: storage_faults.freeze_at_commit,
    ROLLBACK_FROZEN: storage_faults.freeze_at_rollback,
    "slot_fails": _slot_fails,
    LOADS_FAIL: _loads_fail,
    LEAVING: _slot_leaves,
    "cluster_gone": _cluster_gone,
    "go_back": _rewind,
    "rescale_struck": _rescale_struck,
    "drain_struck": _drain_struck,
    "slots_late": _slots_late,
    "savepoint_fails": _savepoint_fails,
    "savepoint_struck": _savepoint_struck,
    SAVEPOINT_SLOW: _savepoint_slow,
    BACKLOGGED: _strike_backlogged,
    ENDING: _strike_complete(lambda recoveries: recoveries.ending),
    PARTLY_FINISHED: _strike_complete(lambda recoveries: recoveries.partly_finished),
    TAKEN_RECOVERING: _strike_complete(lambda recoveries: recoveries.checkpoints),
    COMMITTING: _strike_committing,
}
BESIDES: Final = (
    *(
        "kill_slot",
        "kill_slot_twice",
        "stop_slot",
        "long_call",
        "cut_link",
        "cut_control",
        "kill_driver",
        "stop_driver",
    ),
    *("publish_fails", "publish_hangs", "crash_at_publish", "freeze_at_publish", "storage_lies", "write_fails"),
    *("disk_full", "slow_storage", "disk_gone", "user_error", "open_fails", "read_fails", "commit_fails", "slot_fails"),
    *(LEAVING, "cluster_gone", "stop", "drain", "checkpoint", "cancel", "go_back", "rescale", "slots_late"),
    *("savepoint", "stop_savepoint", "savepoint_fails", BACKLOGGED, IN_FLIGHT, COMMITTING, RECOVERING),
)
"""The kinds that may strike a job while it handles a request."""
