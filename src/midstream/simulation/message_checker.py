"""Checks, at each message, what a coordinator owes its slots and its clients."""

from __future__ import annotations

import re
from collections.abc import Callable, Container
from typing import Final

from midstream.engine.checkpoint.store import list_checkpoints
from midstream.engine.core.config import JobConfig
from midstream.engine.core.ids import TaskId
from midstream.engine.core.interfaces import Storage
from midstream.engine.protocol import messages as m
from midstream.engine.protocol.task_metrics import TaskMetrics

_FAILED_IN_A_ROW: Final = re.compile(r"(\d+) checkpoints in a row have failed")
_NUMBER: Final = re.compile(r"chk-(\d+)$")
ROUNDING_US: Final = 1_500
"""The tolerance for pauses, since the coordinator measures them in whole milliseconds."""
NOT_OPENED: Final = "the checkpoint directory cannot be opened"


class MessageChecker:
    """The checks of one driver. `is_open` has the numbers of the slots whose connections are open. `is_for_savepoint`:
    whether the checkpoint that is being triggered is for a savepoint.
    """

    def __init__(
        self,
        config: JobConfig,
        is_open: Container[int],
        now_us: Callable[[], int],
        is_for_savepoint: Callable[[], bool],
        bug: Callable[[str], None],
    ) -> None:
        self._is_for_savepoint = is_for_savepoint
        self._root = config.checkpoint_dir
        self._pause_us = int(config.min_pause_s * 1000) * 1000
        self._scales_itself = config.autoscale is not None and not config.autoscale.is_advice
        self._is_open = is_open
        self._now_us = now_us
        self._bug = bug
        self._deployed: dict[int, int] = {}
        """The attempt whose tasks each slot runs, as far as the driver was notified."""
        self._triggered: list[int] = []
        """The checkpoints in the order of their triggers, each once."""
        self._ended_us: int | None = None
        """When the last checkpoint completed or failed; None if an attempt has begun since."""
        self._is_ending = False
        """Whether a task of this attempt has reached its end, so that the end of the job waits for a checkpoint."""
        self._failed: set[int] = set()
        """The checkpoints that have failed since one completed, or since the attempt began."""
        self._aborted = -1
        """The checkpoint that was aborted last: every slot receives a message, and late acknowledgements lead to more."""
        self._moves = False
        """Whether a slot has to leave that runs tasks of this attempt."""
        self._requests: dict[int, tuple[m.ClientRequest, int]] = {}
        """Each unanswered request, by client, with the number of checkpoints that had been triggered before it."""
        self._rows_read: dict[TaskId, tuple[int, int | None]] = {}
        """The checkpoint that each task has acknowledged last, and how many rows its first operator had emitted by
        then, if the acknowledgement reports it.
        """
        self._acknowledged: dict[tuple[int, TaskId], int] = {}
        """The newest checkpoint that each task has acknowledged, by attempt and task."""
        self._finished: set[tuple[int, TaskId]] = set()
        """The tasks that have acknowledged a checkpoint as finished, by attempt."""
        self._for_savepoints: set[int] = set()
        """The checkpoints that were triggered for savepoints, whose failures do not count."""

    # ---- requests and answers

    def on_request(self, client: int, request: m.ClientRequest) -> None:
        self._requests[client] = request, len(self._triggered)

    def on_reply(self, client: int, reply: m.Reply) -> None:
        """Check that the checkpoint in an answer was triggered after its request."""
        request, before = self._requests.pop(client)
        number = _NUMBER.search(reply.checkpoint or "")
        if isinstance(request, m.DoCheckpoint) and number and int(number[1]) not in self._triggered[before:]:
            self._bug(f"client {client} receives checkpoint {number[1]}, which was triggered before its request")

    def on_notification(self, text: str) -> None:
        """Check that as many checkpoints in a row have failed as the text reports."""
        row = _FAILED_IN_A_ROW.search(text)
        if row is not None and int(row[1]) > len(self._failed):
            self._bug(f"'{row[0]}' is reported; since the last complete one these have failed: {sorted(self._failed)}")

    def not_published(self, job_id: str, numbers: Container[int], open_storage: Callable[[str], Storage]) -> None:
        """Check that checkpoints which certainly failed have no metadata, from which they could be restored."""
        assert self._root is not None
        for entry in list_checkpoints(open_storage(self._root)):
            if entry.checkpoint_id in numbers and entry.metadata is not None and entry.metadata.job_id == job_id:
                self._bug(f"checkpoint {entry.checkpoint_id} counts as not written, and is there")

    # ---- messages to slots

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
                number in self._triggered[-1:] and number != self._aborted
            ):
                self._ended_us, self._aborted = self._now_us(), number
                if number not in self._for_savepoints:
                    self._failed.add(number)
            case _:  # no other message is checked
                pass

    def _deploys(self, slot: int, deploy: m.Deploy) -> None:
        """Check that no slot still runs tasks of an earlier attempt, which could write and send."""
        for other, attempt in self._deployed.items():
            if attempt < deploy.attempt and other in self._is_open:
                self._bug(f"attempt {deploy.attempt} is deployed, and slot {other} has not cancelled {attempt} yet")
        self._deployed[slot] = deploy.attempt
        self._ended_us = None
        self._is_ending = bool(deploy.finished)
        self._moves = False
        self._failed.clear()

    def _triggers(self, number: int) -> None:
        """Check that a checkpoint that was not requested keeps the minimum pause after the previous one."""
        self._triggered.append(number)
        if self._is_for_savepoint():
            self._for_savepoints.add(number)
        is_requested = (
            self._is_ending
            or self._moves
            or self._scales_itself  # the request is its own then, and not a message
            or any(not isinstance(request, m.GetStatus) for request, _ in self._requests.values())
        )
        if self._ended_us is not None and not is_requested:
            pause_us = self._now_us() - self._ended_us
            if pause_us < self._pause_us - ROUNDING_US:
                self._bug(f"checkpoint {number} comes {pause_us} µs after the last one, the pause is {self._pause_us}")

    # ---- messages of slots, and events about them

    def switches(self, checkpoint_id: int, ref: TaskId, metrics: TaskMetrics) -> None:
        """Check that a source, which is cancelled since the job continues from this checkpoint, has read no more rows."""
        number, rows = self._rows_read.get(ref, (0, None))
        if number != checkpoint_id:  # it has acknowledged a later one that has not completed, or had finished before
            return
        if rows is None:
            self._bug(
                f"source {ref} has acknowledged checkpoint {number}, with which the job moves, without its metrics"
            )
        elif metrics.operators[0][2] > rows:
            self._bug(f"source {ref} has emitted {metrics.operators[0][2] - rows} rows after checkpoint {number}")

    def leaves(self, slot: int) -> None:
        """Note that a slot has to leave: if it has tasks, a checkpoint is needed, so that they can move."""
        self._moves = self._moves or slot in self._deployed

    def on_message(self, slot: int, message: m.FromSlot) -> None:
        match message:
            case m.Cancelled(attempt) if self._deployed.get(slot) == attempt:
                del self._deployed[slot]
            case m.TaskEndOfData() | m.TaskFinished():
                self._is_ending = True
            case m.CheckpointAck(attempt, number, task, metrics=metrics, finished=finished):
                if finished:
                    self._finished.add((attempt, task))
                elif (attempt, task) in self._finished:
                    self._bug(f"task {task} is in checkpoint {number} as running, and had finished in an earlier one")
                self._rows_read[task] = number, None if metrics is None else metrics.operators[0][2]
                newest = self._acknowledged.setdefault((attempt, task), number)
                if number < newest:
                    self._bug(f"task {task} acknowledges checkpoint {number} after {newest}")
                self._acknowledged[attempt, task] = max(newest, number)
            case _:  # no other message is checked
                pass


class OwedCommits:
    """The commits and aborts that were requested from a slot and that it has not answered."""

    def __init__(self, bug: Callable[[str], None], name: str) -> None:
        self.requests: dict[int, bool] = {}
        """By request: whether a commit had failed by then because the storage could not be opened, and no later opening."""
        self._bug = bug
        self._name = name
        self._has_failed = False

    def on_request(self, request: int) -> None:
        self.requests[request] = self._has_failed

    def not_opened(self) -> None:
        """Note that opening the storage has failed: the open requests may fail because of that."""
        self._has_failed = False
        self.requests = dict.fromkeys(self.requests, False)

    def on_answer(self, answer: m.CommitDone | m.CommitFailed) -> None:
        """Check that a commit that comes after such a failure has tried again to open the storage."""
        had_failed = self.requests.pop(answer.request)
        if isinstance(answer, m.CommitFailed) and NOT_OPENED in answer.summary:
            if had_failed:
                self._bug(
                    f"{self._name} fails commit {answer.request} for a storage that it has not tried again to open"
                )
            self._has_failed = True
