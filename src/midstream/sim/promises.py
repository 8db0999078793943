"""What a coordinator owes its slots and those who ask it for something, looked at as each message goes by."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Final

from midstream.checkpoint.store import list_checkpoints
from midstream.core.config import JobConfig
from midstream.core.ids import TaskId
from midstream.core.seams import Storage
from midstream.protocol import messages as m
from midstream.protocol.task_metrics import TaskMetrics

_FAILED_IN_A_ROW: Final = re.compile(r"(\d+) checkpoints in a row have failed")
_NUMBER: Final = re.compile(r"chk-(\d+)$")
ROUNDING_US: Final = 1_500
"""A pause is counted in whole milliseconds, from one to another."""
NOT_OPENED: Final = "the checkpoint directory cannot be opened"


class Promises:
    """Of one driver. `is_open` has the numbers of the slots whose connections are open."""

    def __init__(
        self, config: JobConfig, is_open: Container[int], now_us: Callable[[], int], bug: Callable[[str], None]
    ) -> None:
        self._root = config.checkpoint_dir
        self._pause_us = int(config.min_pause_s * 1000) * 1000
        self._is_open = is_open
        self._now_us = now_us
        self._bug = bug
        self._deployed: dict[int, int] = {}
        """By slot: the attempt whose tasks it runs, as far as the driver can know."""
        self._triggered: list[int] = []
        """Checkpoints, each once."""
        self._ended_us: int | None = None
        """When the last one had, unless an attempt has begun since."""
        self._is_ending = False
        """A task of this attempt has come to its end: the job's waits for a checkpoint."""
        self._failed: set[int] = set()
        """Checkpoints that have failed since one was complete, or since the attempt began."""
        self._moves = False
        """A slot has to leave on which tasks of this attempt run."""
        self._asked: dict[int, tuple[m.ClientRequest, int]] = {}
        """By client that is not answered: its request, and how many checkpoints had been triggered then."""
        self._rows_read: dict[TaskId, tuple[int, int]] = {}
        """By task: the checkpoint that it has acknowledged last, and how many rows its first operator had put out then."""
        self._acknowledged: dict[tuple[int, TaskId], int] = {}
        """By attempt and task: the newest checkpoint that it has acknowledged."""

    # ---- what it is asked for

    def asked(self, client: int, request: m.ClientRequest) -> None:
        self._asked[client] = request, len(self._triggered)

    def answered(self, client: int, reply: m.Reply) -> None:
        """A checkpoint that was asked for is one that was triggered for it."""
        request, before = self._asked.pop(client)
        number = _NUMBER.search(reply.checkpoint or "")
        if isinstance(request, m.DoCheckpoint) and number and int(number[1]) not in self._triggered[before:]:
            self._bug(f"client {client} is told of checkpoint {number[1]}, which was triggered before it had asked")

    def told(self, text: str) -> None:
        """So many checkpoints in a row have failed as is said."""
        row = _FAILED_IN_A_ROW.search(text)
        if row is not None and int(row[1]) > len(self._failed):
            self._bug(f"{row[0]}, is said; since one was complete these have: {sorted(self._failed)}")

    def not_published(self, job_id: str, numbers: Container[int], open_storage: Callable[[str], Storage]) -> None:
        """Of checkpoints that failed for certain there is no metadata: they could be restored."""
        assert self._root is not None
        for entry in list_checkpoints(open_storage(self._root)):
            if entry.checkpoint_id in numbers and entry.metadata is not None and entry.metadata.job_id == job_id:
                self._bug(f"checkpoint {entry.checkpoint_id} counts as not written, and is there")

    # ---- what it tells its slots

    def sent(self, slot: int, message: m.ToSlot) -> None:
        match message:
            case m.Deploy():
                self._deploys(slot, message)
            case m.TriggerCheckpoint(checkpoint_id=number) if number not in self._triggered[-1:]:
                self._triggers(number)
            case m.CheckpointCompleted():
                self._ended_us = self._now_us()
                self._failed.clear()
            case m.CheckpointAborted(checkpoint_id=number) if (
                number in self._triggered[-1:] and number not in self._failed
            ):
                self._ended_us = self._now_us()
                self._failed.add(number)
            case _:  # the others promise nothing
                pass

    def _deploys(self, slot: int, deploy: m.Deploy) -> None:
        """No slot runs tasks of an earlier attempt any more: they could still write, and send."""
        for other, attempt in self._deployed.items():
            if attempt < deploy.attempt and other in self._is_open:
                self._bug(f"attempt {deploy.attempt} is deployed, and slot {other} has not cancelled {attempt} yet")
        self._deployed[slot] = deploy.attempt
        self._ended_us = None
        self._is_ending = bool(deploy.finished)
        self._moves = False
        self._failed.clear()

    def _triggers(self, number: int) -> None:
        """A checkpoint that nobody waits for keeps the pause behind the one before it."""
        self._triggered.append(number)
        is_wanted = (
            self._is_ending
            or self._moves
            or any(not isinstance(asked, m.GetStatus) for asked, _ in self._asked.values())
        )
        if self._ended_us is not None and not is_wanted:
            pause_us = self._now_us() - self._ended_us
            if pause_us < self._pause_us - ROUNDING_US:
                self._bug(f"checkpoint {number} comes {pause_us} µs behind the last one, the pause is {self._pause_us}")

    # ---- what slots tell it, and what it is told of them

    def switches(self, checkpoint_id: int, ref: TaskId, metrics: TaskMetrics) -> None:
        """The job goes on elsewhere from this checkpoint, and this source is cancelled."""
        number, rows = self._rows_read.get(ref, (0, 0))
        if number == checkpoint_id and metrics.operators[0][2] > rows:
            self._bug(f"source {ref} has put out {metrics.operators[0][2] - rows} rows behind checkpoint {number}")

    def leaves(self, slot: int) -> None:
        """What it runs on is to end: if it has tasks, a checkpoint is wanted, so that they can move."""
        self._moves = self._moves or slot in self._deployed

    def heard(self, slot: int, message: m.FromSlot) -> None:
        match message:
            case m.Cancelled(attempt) if self._deployed.get(slot) == attempt:
                del self._deployed[slot]
            case m.TaskEndOfData() | m.TaskFinished():
                self._is_ending = True
            case m.CheckpointAck(attempt, number, task, metrics=metrics):
                if metrics is not None:
                    self._rows_read[task] = number, metrics.operators[0][2]
                newest = self._acknowledged.setdefault((attempt, task), number)
                if number < newest:
                    self._bug(f"task {task} acknowledges checkpoint {number} behind {newest}")
                self._acknowledged[attempt, task] = max(newest, number)
            case _:  # the others promise nothing
                pass


class OwedCommits:
    """Commits and aborts that a slot has been asked for and has not answered."""

    def __init__(self, bug: Callable[[str], None], name: str) -> None:
        self.requests: dict[int, bool] = {}
        """Each with whether one had failed by then because the storage could not be opened, which has not failed since."""
        self._bug = bug
        self._name = name
        self._has_failed = False

    def asked(self, request: int) -> None:
        self.requests[request] = self._has_failed

    def not_opened(self) -> None:
        """What was asked for may fail by this."""
        self._has_failed = False
        self.requests = dict.fromkeys(self.requests, False)

    def answered(self, answer: m.CommitDone | m.CommitFailed) -> None:
        """Where the storage could not be opened, the next commit tries again: one failure of it is a reason only once."""
        had_failed = self.requests.pop(answer.request)
        if isinstance(answer, m.CommitFailed) and NOT_OPENED in answer.summary:
            if had_failed:
                self._bug(
                    f"{self._name} fails commit {answer.request} for a storage that it has not tried again to open"
                )
            self._has_failed = True
