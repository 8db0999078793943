"""Faults of a job's storage, of one operation of it, or of one commit; `faults` lists all kinds."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.simulation.trace import Kind
from midstream_lab.faulty_disk import DELETED, MARKED

if TYPE_CHECKING:
    from midstream_lab.faults import LabTarget


def storage_lies(stage: LabTarget, victim: int) -> bool:
    """Carry out writes, creations and deletions, and nevertheless report them as failed."""
    if victim % 3:
        stage.disk.lies += 1 + victim // 3 % 4
    else:
        stage.disk.denials += 1
    return True


def publish_lies(stage: LabTarget, victim: int) -> bool:
    """Write the metadata of the next checkpoint, and nevertheless report that as failed."""
    stage.disk.lying_names.add("_metadata")
    return True


def delete_fails(stage: LabTarget, victim: int) -> bool:
    """Let only the third try delete a checkpoint from now on: the coordinator tries that often before the job ends."""
    stage.disk.deletes_late = True
    return True


def freeze_at_commit(stage: LabTarget, victim: int) -> bool:
    """Stop the driver in the middle of its next commit. Another driver takes over, and the job rewinds to an older
    checkpoint, or to the beginning; the old one continues only then. Of these drivers, half of those whose sinks must
    roll back output are killed before that.
    """
    world, outside, driver = stage.world, stage.outside, stage.driver
    if outside.before_commit is not None:
        return False
    delay_us = 20_000 + victim // 8 % 200_000

    def in_commit() -> None:
        process = driver.process
        if world.writer is not process or process.paused or stage.driver is not driver or stage.cluster.drained:
            return
        stage.cluster.struck_us.append(world.now_us)
        process.pause()
        world.schedule(delay_us, None, Kind.FAULT, process.resume, f"{process.name} wakes up")
        stage.rewind(victim // 8)
        stage.give_up_driver()
        if victim // 32 % 2:
            outside.before_rollback = killed
        world.hang(delay_us)

    def killed() -> None:
        stage.cluster.struck_us.append(world.now_us)
        world.schedule(0, None, Kind.FAULT, stage.driver.process.crash, "crash before output is rolled back")
        world.hang(1)

    outside.before_commit = in_commit
    return True


def freeze_at_rollback(stage: LabTarget, victim: int) -> bool:
    """Stop the next driver that rolls back output in the middle of that. Another driver takes over; the old one
    continues only then.
    """
    world, outside = stage.world, stage.outside
    if outside.before_rollback is not None:
        return False
    delay_us = 20_000 + victim % 200_000

    def in_rollback() -> None:
        process = stage.driver.process
        if world.writer is not process or process.paused:
            return
        stage.cluster.struck_us.append(world.now_us)
        process.pause()
        world.schedule(delay_us, None, Kind.FAULT, process.resume, f"{process.name} wakes up")
        stage.give_up_driver()
        world.hang(delay_us)

    outside.before_rollback = in_rollback
    return True


def freeze_at_deletion(stage: LabTarget, victim: int) -> bool:
    """Stop the driver before it marks the next checkpoint that it does not retain (`victim` even), or before it deletes
    that. Another driver takes over, and the job rewinds to that checkpoint, if it may; the old one continues only then.
    """
    world, disk = stage.world, stage.disk
    what = (MARKED, DELETED)[victim % 2]
    if what in disk.before_dropping:
        return False
    delay_us = 20_000 + victim // 2 % 25_000

    def about_to_drop() -> int:
        process = stage.driver.process
        if world.writer is not process or process.paused or not process.alive or stage.cluster.drained:
            return 0
        stage.cluster.struck_us.append(world.now_us)
        process.pause()
        world.schedule(delay_us, None, Kind.FAULT, process.resume, f"{process.name} wakes up")
        stage.rewind(0)
        stage.give_up_driver()
        return delay_us

    disk.before_dropping[what] = about_to_drop
    return True


def disk_full(stage: LabTarget, victim: int) -> bool:
    disk = stage.disk
    disk.is_full = True

    def room() -> None:
        disk.is_full = False

    stage.world.schedule(1_000 + victim % 40_000, None, Kind.FAULT, room, "the disk has room again")
    return True
