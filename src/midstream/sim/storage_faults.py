"""What befalls the storage of a job, or one operation of it: see `faults`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.sim.trace import Kind

if TYPE_CHECKING:
    from midstream.sim.faults import Stage


def publish_fails(stage: Stage, victim: int) -> bool:
    stage.disk.failing_names["_metadata"] = 1 + victim % 3
    return True


def storage_lies(stage: Stage, victim: int) -> bool:
    """What is written, created or deleted is there, or gone, and is said to have failed."""
    if victim % 3:
        stage.disk.lies += 1 + victim // 3 % 4
    else:
        stage.disk.denials += 1
    return True


def publish_lies(stage: Stage, victim: int) -> bool:
    """The next checkpoint's metadata is written, and is said not to be."""
    stage.disk.lying_names.add("_metadata")
    return True


def delete_fails(stage: Stage, victim: int) -> bool:
    """From now on checkpoints can be deleted with the third try only: that is how often it is tried before the job ends."""
    stage.disk.deletes_late = True
    return True


def write_fails(stage: Stage, victim: int) -> bool:
    first = stage.disk.writes + 1 + victim % 5
    stage.disk.failing_writes.update(range(first, first + 1 + victim % 3))
    return True


def disk_full(stage: Stage, victim: int) -> bool:
    disk = stage.disk
    disk.is_full = True

    def room() -> None:
        disk.is_full = False

    stage.world.schedule(1_000 + victim % 40_000, None, Kind.FAULT, room, "the disk has room again")
    return True


def disk_gone(stage: Stage, victim: int) -> bool:
    """Nothing can be read, listed, written or deleted for a while."""
    disk = stage.disk
    disk.is_gone = True

    def back() -> None:
        disk.is_gone = False

    stage.world.schedule(1_000 + victim % 30_000, None, Kind.FAULT, back, "the disk is back")
    return True


def slow_storage(stage: Stage, victim: int) -> bool:
    """Everything on the I/O pools takes fifty times as long for a while."""
    processes = [process for process in stage.world.processes if process.alive and process.io_us < 100_000]
    for process in processes:
        process.io_us *= 50

    def fast() -> None:
        for process in processes:
            process.io_us //= 50

    stage.world.schedule(1_000 + victim % 200_000, None, Kind.FAULT, fast, "storage is as fast as before")
    return True
