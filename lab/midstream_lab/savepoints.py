"""Savepoints of a run: their directories, and the rules for them.

A savepoint that was reported must be complete and correct, must have all its files at its directory, and
must never change. If a savepoint was refused, its directory must be free again, unless the disk there failed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from midstream.engine.checkpoint.metadata import decode_metadata
from midstream.engine.checkpoint.store import is_metadata_path
from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol.messages import ClientRequest, DoSavepoint, DoStop, Reply
from midstream.simulation.cluster import SimulatedDriver
from midstream.simulation.disk import Folder
from midstream.simulation.network import SIM
from midstream.simulation.trace import Kind
from midstream.simulation.world import World
from midstream_lab.checkers.checkpoint_checker import CheckpointChecker, Cut
from midstream_lab.checkers.driver_checker import checker_of
from midstream_lab.checkers.failure_causes import THERE
from midstream_lab.faulty_disk import FaultyDisk

WRITES_MAX: Final = 50
RUNNING: Final = frozenset(("created", "deploying", "running", "restarting", "rescaling", "moving"))
ENDS: Final = ("the job has finished", "the job has stopped")
"""Reasons that excuse only a savepoint without a completed checkpoint: see `_was_to_be_waited_for`."""
EXCUSES: Final = (
    SIM,
    *ENDS,
    "the job is stopping already",
    "the job has ended",
    "the job had finished before it was started",
    "the place is taken",
    "the job has no checkpoint_dir",
    "another coordinator has taken over",
    "only some of its subtasks have finished",
    "not complete within",
)
"""A refusal without any of these texts has no valid reason."""
AT_REST: Final = "the job was stopped while no task ran"
"""The reason after another stop, of a job that has not begun or is being restarted: no checkpoint can be taken then."""
REFUSED: Final = "no savepoint was made: the checkpoint directory: "
"""The reason of a job that does not start, with this program or at all. A stop is answered with the failure itself."""
SLOTS_LATE: Final = " came within "
"""The reason of an attempt that fails because its slots did not come before `slot_timeout`."""
AWAY_US: Final = 20_000
"""The longest time for which the disk of a directory is full or gone."""


@dataclass(slots=True)
class Saved:
    """A savepoint that was reported to a client."""

    url: str
    cut: Cut
    """The cut that it represents."""
    files: dict[str, bytes]
    """Its files by path, which never change."""
    was_stop: bool


class Savepoints:
    """All disks of the world by root, and the requests for savepoints on them."""

    def __init__(self, world: World, checker: CheckpointChecker, disks: dict[str, FaultyDisk]) -> None:
        self.saved: list[Saved] = []
        self.made = 0
        self.failed = 0
        """The number of requests that were refused, with a reason."""
        self._world = world
        self._checker = checker
        self._disks = disks
        self._directory_count = 0
        self._named: Counter[str] = Counter()
        """The number of requests for each directory."""
        self._requests: dict[tuple[str, int], str | None] = {}
        """The requested directory, by driver and client."""
        self._refused: list[tuple[SimulatedDriver, str]] = []
        self._late: set[str] = set()
        """The directories of savepoints that were completed when a later start of the job had taken over."""

    # ---- directories

    def open(self, root: str) -> Storage:
        """Return the storage at `root`: a new disk, unless it lies on an existing one."""
        for known, disk in self._disks.items():
            if root == known:
                return disk
            if root.startswith(f"{known}/"):
                return Folder(disk, root[len(known) + 1 :])
        disk = self._disks[root] = FaultyDisk(self._world)
        disk.on_write = partial(self.written, root)
        return disk

    def written(self, root: str, path: str, data: bytes) -> None:
        """Check a file that was written to the disk at `root`: if it completes a savepoint, that is judged now, even if
        it is never reported.
        """
        directory, _, name = f"/{path}".rpartition("/chk-")
        directory = directory.removeprefix("/")
        if is_metadata_path(f"chk-{name}"):
            url = f"{root}/{directory}" if directory else root
            (self._late.add if self._checker.is_late(data) else self._late.discard)(url)
            for complaint in self._checker.check_savepoint(url, self.open(url), data):
                self._world.bug(complaint)

    def files_at(self, url: str) -> dict[str, bytes]:
        """Return all files of a directory, by their paths below `url`."""
        disk, below = self._disk_of(url)
        return {path[len(below) :]: data for path, data in disk.files.items() if path.startswith(below)}

    def _disk_of(self, url: str) -> tuple[FaultyDisk, str]:
        self.open(url)
        root = next(root for root in self._disks if f"{url}/".startswith(f"{root}/"))
        return self._disks[root], f"{url}/"[len(root) + 1 :]

    def move(self, saved: Saved) -> None:
        """Move a savepoint to another root; nothing remains at its former directory."""
        disk, below = self._disk_of(saved.url)
        for path in saved.files:
            del disk.files[below + path]
        self._directory_count += 1
        saved.url = f"sim://moved/{self._directory_count}"
        self.open(saved.url)
        self._disks[saved.url].files.update(saved.files)

    def forget_below(self, root: str) -> None:
        """Delete a directory, with all savepoints in it."""
        del self._disks[root]
        self.saved = [saved for saved in self.saved if not f"{saved.url}/".startswith(f"{root}/")]
        for url in [url for url in self._named if url.startswith(f"{root}/")]:
            del self._named[url]

    # ---- requests and answers

    def request(
        self, driver: SimulatedDriver, victim: int, *, stop: bool, fails: bool = False, slow_us: int = 0
    ) -> None:
        """Request a savepoint at a new directory, below the job's directory, or at a directory that was requested before.

        `slow_us`: at a new directory whose disk takes so long to write a file.
        """
        root = driver.plan.config.checkpoint_dir or "sim://nowhere"
        self._directory_count += 1
        where = 2 if fails or slow_us else victim % 8
        url: str | None = f"sim://saved/{self._directory_count}"
        if where == 0:
            url = f"{root}/savepoints/mine-{self._directory_count}" if stop else None
        elif where == 1 and self._named:
            url = list(self._named)[victim // 8 % len(self._named)]
        if url is not None:
            self._named[url] += 1
            self.open(url)
            if slow_us:
                self._disks[url].slow_us = slow_us
            if fails:
                self._break(self._disks[url], victim // 8)
        client = driver.request(DoStop(savepoint=url) if stop else DoSavepoint(url))
        self._requests[driver.process.name, client] = url

    def _break(self, disk: FaultyDisk, victim: int) -> None:
        """Let the disk be full from the beginning, or fail when the savepoint is half written or almost complete."""
        away_us = 1 + victim % AWAY_US
        match victim % 7:
            case 0:
                disk.is_full = True
                self._world.schedule(
                    away_us, None, Kind.FAULT, partial(_there_again, disk), "a directory has room again"
                )
            case 1:
                disk.failing_names["_metadata"] = 1
                disk.before_write["_metadata"] = partial(self._take_away, disk, away_us)
            case 2:
                disk.failing_names["_metadata"] = 1
            case 3:
                disk.failing_writes.update(range(2, WRITES_MAX))
            case _:  # one of the first writes
                disk.failing_writes.add(2 + victim // 7 % 4)

    def _take_away(self, disk: FaultyDisk, away_us: int) -> None:
        """Make the disk unavailable for a while, so that the files written so far cannot be deleted."""
        disk.is_gone = True
        self._world.schedule(away_us, None, Kind.FAULT, partial(_there_again, disk), "a directory is back")

    def answered(self, driver: SimulatedDriver, client: int, request: ClientRequest, reply: Reply) -> None:
        key = driver.process.name, client
        if key not in self._requests:
            self._check_complete(driver, request, reply)
            return
        url = self._requests.pop(key)
        if reply.error:
            self.failed += 1
            is_replaced = (
                driver is not driver.cluster.drivers[-1]
            )  # its successor may have deleted the files that it needs
            is_denied = THERE in reply.error and (
                len(driver.cluster.drivers) > 1 or any(disk.denied for disk in self._disks.values())
            )
            is_at_rest = AT_REST in reply.error  # that its output is what its checkpoint holds is checked at its end
            is_failure = driver.coordinator.outcome is not None and reply.error == str(driver.coordinator.outcome[1])
            is_refused = (REFUSED in reply.error or is_failure) and not checker_of(
                driver
            ).triggers  # the restarter checks the reason
            is_late = SLOTS_LATE in reply.error and driver.has_late_slots
            is_excused = is_replaced or is_denied or is_at_rest or is_refused or is_late
            if not is_excused and not any(excuse in reply.error for excuse in EXCUSES):
                self._world.bug(f"{request!r} fails without a reason: {reply.error}")
            number = self._was_to_be_waited_for(driver, client, reply.error)
            if number is not None and not is_replaced:
                self._world.bug(
                    f"{request!r} is refused ({reply.error}), while checkpoint {number}, which was made for it, is there"
                )
            if url is not None:
                self._refused.append((driver, url))
                if driver.state in RUNNING:  # otherwise the directory is freed while the job ends
                    self._check_free(url)
            return
        saved = reply.checkpoint
        if saved is None:
            self._world.bug(f"{request!r} is answered without a savepoint and without a reason")
        elif url is not None and url != saved:
            self._world.bug(f"{request!r} is answered with {saved}")
        else:
            self._keep(saved, isinstance(request, DoStop))

    def _check_complete(self, driver: SimulatedDriver, request: ClientRequest, reply: Reply) -> None:
        """Check that the checkpoint in an answer is complete. (A savepoint is checked with the request for it.)"""
        path = reply.checkpoint or ""
        number = path.rpartition("chk-")[2]
        if number.isdecimal() and path not in (saved.url for saved in self.saved):
            # a stop while no task ran may report the checkpoint of the start, which is another's
            is_of_start = not checker_of(driver).triggers or path == driver.coordinator.restored_from
            if not self._checker.has_completed(None if is_of_start else driver.plan.job_id, int(number)):
                self._world.bug(f"{request!r} is answered with {reply.checkpoint}, which is not complete")

    def _was_to_be_waited_for(self, driver: SimulatedDriver, client: int, reason: str) -> int | None:
        """Return the checkpoint of a savepoint that was refused because the job has ended; None if there is none.

        A job that ends by itself, or by request, may refuse a savepoint if its directory is not claimed yet, or if no
        checkpoint has been completed since the claim: the end of the job does not wait for it. But the first checkpoint
        that was triggered after the claim, once complete, must become the savepoint, and the end of the job waits for
        that.
        """
        checker = checker_of(driver)
        if client not in checker.claimed or not reason.endswith(ENDS):
            return None
        later = checker.triggers[checker.claimed[client] :]
        return next((number for number in later if self._checker.has_completed(driver.plan.job_id, number)), None)

    def _keep(self, url: str, was_stop: bool) -> None:
        files = self.files_at(url)
        complete = [path for path in files if is_metadata_path(path)]
        if len(complete) != 1:
            self._world.bug(f"savepoint {url} is reported as complete; its files are {sorted(files)}")
            return
        if url in self._late:
            self._world.bug(
                f"savepoint {url} is reported as complete, and was completed after a later start of its job"
            )
        cut = self._checker.cut_of(decode_metadata(files[complete[0]], url))
        if cut is not None:  # otherwise a complaint was made when it was written
            self.made += 1
            self.saved.append(Saved(url, cut, files, was_stop))

    def _check_free(self, url: str) -> None:
        """Check that nothing is left of a savepoint that failed, if no other was requested at the same directory."""
        disk, _ = self._disk_of(url)
        left = self.files_at(url)
        if left and self._named[url] == 1 and not disk.refusals and not disk.lied:
            self._world.bug(f"no savepoint was made at {url}, and this is left of it: {sorted(left)}")

    # ---- at the end

    def check_end(self) -> Iterator[str]:
        """Yield complaints about directories after the end of all jobs."""
        for saved in self.saved:
            if self.files_at(saved.url) != saved.files:
                yield f"savepoint {saved.url} was changed after it had been made"
        for driver, url in self._refused:
            if driver.process.alive:  # otherwise it could not free the directory any more
                self._check_free(url)


def _there_again(disk: FaultyDisk) -> None:
    disk.is_full = disk.is_gone = False
