"""A report on a stuck run, as text: all tasks and channels, with what they wait for, and the next scheduled steps."""

from __future__ import annotations

from collections.abc import Iterator

from midstream.engine.exchange.input_channel import RemoteChannel
from midstream.engine.worker.task import Task
from midstream.simulation.cluster import SimulatedCluster, SimulatedDriver
from midstream.simulation.simulated_slot import SimulatedSlot


def who_waits(cluster: SimulatedCluster, driver: SimulatedDriver) -> Iterator[str]:
    yield f"{driver.process.name}: {'alive' if driver.process.alive else 'dead'}, outcome {driver.outcome}"
    if driver.process.alive and driver.outcome is None:
        status = driver.coordinator.status(driver.process.now_ms())
        if status is not None:
            yield (
                f"  job is {status.state}, attempt {status.attempt}, slots {status.slots} of {status.slots_needed}, "
                f"checkpoints {status.checkpoints_completed} completed, {status.checkpoints_failed} failed"
            )
            for checkpoint in status.checkpoints[:3]:
                yield f"  checkpoint {checkpoint.id} {checkpoint.state} {checkpoint.reason}"
            for failure in status.failures[:3]:
                yield f"  failure in attempt {failure.attempt}: {failure.summary}"
    for slot in cluster.live_slots:
        yield from _slot(slot)
    yield "still to come:"
    yield from (f"  {line}" for line in cluster.world.waiting()[:30])


def _slot(slot: SimulatedSlot) -> Iterator[str]:
    machine = slot.machine
    flags = " stopped" if slot.process.paused else ""
    if machine is None:
        yield f"{slot.process.name}{flags}: not welcomed yet"
        return
    pool = f"{machine.pool.in_use} of {machine.pool.total} buffers in use" if machine.pool else "no pool"
    yield f"{slot.process.name}{flags}: slot {machine.slot_id}, {machine.state.name}, attempt {machine.attempt}, {pool}"
    for task in machine.tasks.values():
        yield from _task(task)


def _task(task: Task) -> Iterator[str]:
    yield f"  task {task.ref} {task.vertex.name}: {task.state.value}; waits for {', '.join(_waits(task)) or 'nothing'}"
    if task.is_live:
        yield f"    next step: {task.next_step().value}"
    for gate in task.gates:
        for index, channel in enumerate(gate.channels):
            state = ("has data" if channel.queue else "empty") + (", blocked" if index in gate._blocked else "")
            if isinstance(channel, RemoteChannel):
                state += (
                    f", credit {channel._credit}, batches {channel._batch_buffers} (partial {channel._partial_buffers})"
                    f" of {channel._window}, limit {channel.queue.limit}"
                )
            yield f"    {channel.id} {state}"
    for partition in task.partitions:
        for sub in partition.subpartitions:
            if sub.queued_buffers or not sub.is_empty:
                yield f"    {sub.channel} output: {sub.queued_buffers} buffers{'' if sub.is_empty else ', not empty'}"


def _waits(task: Task) -> Iterator[str]:
    for partition in task.partitions:
        if task.is_live and not partition.is_available():
            yield f"room in the output of e{partition.edge.id}"
    if task.is_live and not any(channel.queue for gate in task.gates for channel in gate.channels):
        yield "input" if task.gates else "its source or the coordinator"
