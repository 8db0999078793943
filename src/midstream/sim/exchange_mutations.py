"""Known bugs of channels, queues and credit, to be put back on purpose: see `sim.mutations`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from midstream.exchange.channel import RemoteChannel
from midstream.exchange.gate import InputGate
from midstream.exchange.partition import Subpartition
from midstream.exchange.queue import ElementQueue
from midstream.sim.mutation import Mutation, Replacements, nothing


def resume_forgets() -> Replacements:
    """The channel that is resumed after an alignment is not looked at again."""

    def resume(self: Any, channel: int) -> None:
        self._blocked.discard(channel)

    return [(InputGate, "resume", resume)]


def block_nothing() -> Replacements:
    return [(InputGate, "block", lambda self, channel: self._blocked.add(channel)), (InputGate, "check", nothing)]


def leak_credit() -> Replacements:
    original = RemoteChannel.freed

    def freed(self: Any, buffers: int) -> None:
        original(self, buffers)
        if buffers > 1:
            self._quota.take(1)

    return [(RemoteChannel, "freed", freed)]


def grant_nothing_back() -> Replacements:
    original = RemoteChannel._top_up

    def top_up(self: Any) -> None:
        if not self._sequence:
            original(self)

    return [(RemoteChannel, "_top_up", top_up)]


def rest_is_not_granted() -> Replacements:
    """A batch larger than its queue's limit never comes to its end."""
    original = RemoteChannel._top_up

    def top_up(self: Any) -> None:
        if self._partial_buffers < max(1, self.queue.limit):
            original(self)

    return [(RemoteChannel, "_top_up", top_up)]


def read_rows_still_wait() -> Replacements:
    """What was read counts as waiting, so that the limit is reached for ever."""

    def take(self: Any, rows_max: int) -> Any:
        before = self.waiting
        taken = original(self, rows_max)
        self.waiting = before
        return taken

    original = ElementQueue.take
    return [(ElementQueue, "take", take), (ElementQueue, "check", nothing)]


def limit_of_nothing() -> Replacements:
    """Not even one batch is in order."""

    def set_limit(self: Any, *_: Any) -> None:
        self.limit = 0

    return [(ElementQueue, "_set_limit", set_limit), (ElementQueue, "check", nothing)]


def drop_an_element() -> Replacements:
    """A discarded batch of a blocked channel: in-flight data is forgotten at a barrier."""
    original = InputGate.block

    def block(self: Any, channel: int) -> None:
        original(self, channel)
        queue = self.channels[channel].queue
        if len(queue) and not queue.head_is_event():
            self.channels[channel].take(1)
            self.channels[channel].done()

    return [(InputGate, "block", block)]


def end_overtakes() -> Replacements:
    """The end of data overtakes what waits in the subpartition."""
    original = Subpartition.add

    def add(self: Any, element: Any) -> None:
        original(self, element)
        if type(element).__name__ == "EndOfData" and len(self.queue) > 1:
            self.queue._items.rotate(1)

    return [(Subpartition, "add", add)]


MUTATIONS: Final[Mapping[str, Mutation]] = {
    "resume_forgets": Mutation("a resumed channel is not read again", resume_forgets),
    "block_nothing": Mutation("a blocked channel is read on", block_nothing),
    "leak_credit": Mutation("a buffer of a large batch is never given back", leak_credit),
    "grant_nothing_back": Mutation("credit is granted once only", grant_nothing_back),
    "rest_is_not_granted": Mutation("a batch above the limit of its queue is not granted", rest_is_not_granted),
    "read_rows_still_wait": Mutation("rows that were read still count as waiting", read_rows_still_wait),
    "limit_of_nothing": Mutation("the queue of a slow reader takes nothing any more", limit_of_nothing),
    "drop_an_element": Mutation("in-flight data is forgotten at a barrier", drop_an_element),
    "end_overtakes": Mutation("the end of data overtakes rows", end_overtakes),
}
