"""Known bugs of tasks and sources, to be put back on purpose: see `sim.mutations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from midstream.core.elements import EndOfPartition
from midstream.sim.mutation import Mutation, Replacements
from midstream.worker import task
from midstream.worker.source import SourceDriver


def partition_ends_early() -> Replacements:
    original = task.Task._finish

    def finish(self: Any) -> None:
        original(self)
        if self.state is task.TaskState.FINISHING:
            self._edges.broadcast(EndOfPartition())
            self._end = lambda *_: task.Task._end(self)
            self._edges.broadcast = lambda event: None

    return [(task.Task, "_finish", finish)]


def failure_discards() -> Replacements:
    """A failed task drops its channels while its peers still use them."""
    original = task.Task.fail

    def fail(self: Any, error: BaseException, **symptom: bool) -> None:
        was_live = self.is_live
        original(self, error, **symptom)
        if was_live:
            self.close()

    return [(task.Task, "fail", fail)]


def early_split() -> Replacements:
    def add_split(self: Any, split: bytes, is_last: bool) -> None:
        if self._source is not None and self.is_live:
            self._source.add_split(split, is_last=is_last)

    return [(task.Task, "add_split", add_split)]


def offset_before_emit() -> Replacements:
    """What was read ahead counts as emitted."""
    original = SourceDriver.snapshot

    def snapshot(self: Any, chunk_id: str) -> Any:
        before = [current.split for current in self._open]
        for current in self._open:
            if current.ahead is not None:
                current.split = msgspec.structs.replace(current.split, offset=current.ahead[1])
        part = original(self, chunk_id)
        for current, split in zip(self._open, before, strict=True):
            current.split = split
        return part

    return [(SourceDriver, "snapshot", snapshot)]


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "partition_ends_early": Mutation("EndOfPartition before the final checkpoint", partition_ends_early),
    "failure_discards": Mutation("a failed task drops channels that peers still use", failure_discards),
    "early_split": Mutation("a split that comes after the trigger is in the snapshot", early_split),
    "offset_before_emit": Mutation("rows that were read ahead count as emitted", offset_before_emit),
}
