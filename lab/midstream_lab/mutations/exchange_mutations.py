"""Known bugs of channels, queues and credit, to be put back on purpose: see `midstream_lab.mutations.catalog`."""

from __future__ import annotations

from typing import Any, Final
from weakref import WeakKeyDictionary

from midstream.engine.core.elements import CheckpointBarrier, Watermark
from midstream.engine.core.ids import ChannelId
from midstream.engine.core.key_groups import subtask_of as subtask_of_groups
from midstream.engine.exchange import result_partition as partition
from midstream.engine.exchange.batch_lease import LeasedBatch, release
from midstream.engine.exchange.element_queue import ElementQueue
from midstream.engine.exchange.input_channel import RemoteChannel
from midstream.engine.exchange.input_gate import InputGate
from midstream.engine.exchange.peer_link import PeerLink
from midstream.engine.exchange.result_partition import ResultPartition
from midstream.engine.exchange.subpartition import Subpartition
from midstream.engine.worker.deployment import Deployment
from midstream_lab.mutations.mutation import Mutation, Replacements, named, nothing
from midstream_lab.scenarios import targeted


def resume_forgets() -> Replacements:
    """A channel that is resumed after an alignment is not read again."""

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
            self._quota.charge(1)

    return [(RemoteChannel, "freed", freed)]


def grant_nothing_back() -> Replacements:
    original = RemoteChannel._top_up

    def top_up(self: Any) -> None:
        if not self._sequence:
            original(self)

    return [(RemoteChannel, "_top_up", top_up)]


def rest_is_not_granted() -> Replacements:
    """A batch larger than its queue's limit is never sent to its end."""
    original = RemoteChannel._top_up

    def top_up(self: Any) -> None:
        if self._partial_buffers < max(1, self.queue.limit):
            original(self)

    return [(RemoteChannel, "_top_up", top_up)]


def read_rows_still_wait() -> Replacements:
    """What was read counts as waiting, so that the limit is reached indefinitely."""

    def take(self: Any, rows_max: int) -> Any:
        before = self.queued_buffers
        taken = original(self, rows_max)
        self.queued_buffers = before
        return taken

    original = ElementQueue.take
    return [(ElementQueue, "take", take), (ElementQueue, "check", nothing)]


def limit_of_nothing() -> Replacements:
    """Not even one batch may be queued."""

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
            self.channels[channel].take(1).release()

    return [(InputGate, "block", block)]


def end_overtakes() -> Replacements:
    """The end of data overtakes what waits in the subpartition."""
    original = Subpartition.add

    def add(self: Any, element: Any) -> None:
        original(self, element)
        if type(element).__name__ == "EndOfData" and len(self.queue) > 1:
            self.queue._items.rotate(1)

    return [(Subpartition, "add", add)]


# ---- credit and charges


def credit_twice() -> Replacements:
    """Credit is announced twice."""
    original = PeerLink.grant

    def grant(self: Any, channel: Any, credits: int) -> None:
        original(self, channel, 2 * credits)

    return [(PeerLink, "grant", grant)]


def partial_kept_over_a_cut() -> Replacements:
    """The next attempt continues the batch of which a part had arrived when a connection was cut."""
    make_gate, discard = Deployment._gate, RemoteChannel.discard
    of_slots: WeakKeyDictionary[Any, dict[ChannelId, Any]] = WeakKeyDictionary()
    """The channels of the attempt before, by the executor of the slot."""

    def keep(self: Any) -> None:
        self.kept = self._partial, self._partial_filled
        discard(self)

    def gate_as_before(self: Any, *arguments: Any) -> InputGate:
        gate = make_gate(self, *arguments)
        before = of_slots.setdefault(self._services.executor, {})
        for channel in gate.channels:
            if isinstance(channel, RemoteChannel):
                partial, filled = getattr(before.get(channel.id), "kept", (None, 0))
                if partial is not None:
                    channel._partial, channel._partial_filled = partial, filled
                before[channel.id] = channel
        return gate

    return [(Deployment, "_gate", gate_as_before), (RemoteChannel, "discard", keep)]


def freed_when_taken() -> Replacements:
    """The buffers of a batch are free when it is taken, not when it is processed."""
    original = RemoteChannel.take

    def take(self: Any, rows_max: int) -> Any:
        element = original(self, rows_max)
        if isinstance(element, LeasedBatch):
            self.freed(element.buffers)
            element.hold()  # so that they are not freed again
        return element

    return [(RemoteChannel, "take", take)]


def freed_with_the_next() -> Replacements:
    """The buffers of a batch are free when the next one is processed."""
    original, done = RemoteChannel.take, InputGate.processed

    def take(self: Any, rows_max: int) -> Any:
        element = original(self, rows_max)
        if isinstance(element, LeasedBatch):
            self.current_batch = element.hold()
        return element

    def release_the_last(self: Any) -> None:
        remote = [self.channels[i] for i in self.read_from if isinstance(self.channels[i], RemoteChannel)]
        done(self)
        for channel in remote:
            release(getattr(channel, "processed", ()))
            channel.processed = (channel.current_batch,)

    return [(RemoteChannel, "take", take), (InputGate, "processed", release_the_last)]


def local_batch_never_freed() -> Replacements:
    """What a consumer in the same slot has processed is charged indefinitely, when it was joined of several."""
    original = Subpartition.take

    def take(self: Any, rows_max: int) -> Any:
        taken = original(self, rows_max)
        if self.is_local and isinstance(taken, LeasedBatch):
            _keep_all_but_the_first(taken)
        return taken

    return [(Subpartition, "take", take)]


def _keep_all_but_the_first(batch: Any) -> None:
    for part in getattr(batch._account, "parts", ())[1:]:
        part.hold()


def captured_is_freed_at_once() -> Replacements:
    """What a checkpoint holds is not charged while it is written."""

    def hold(self: Any) -> Any:
        return LeasedBatch(self.batch, 0, _Uncharged())

    return [(LeasedBatch, "hold", hold)]


class _Uncharged:
    def freed(self, buffers: int) -> None:
        pass


# ---- order, and which consumer gets what


def broadcast_skips_the_last() -> Replacements:
    """Rows for all consumers do not go to the last one."""

    def emit_to_all(self: Any, batch: Any) -> None:
        for sub in self.subpartitions[:-1] or self.subpartitions:
            sub.add(batch)

    return [(ResultPartition, "_emit_to_all", emit_to_all)]


def watermark_skips_the_last() -> Replacements:
    """Watermarks do not go to the last consumer."""
    original = ResultPartition.broadcast

    def broadcast(self: Any, event: Any) -> None:
        if isinstance(event, Watermark):
            for sub in self.subpartitions[:-1] or self.subpartitions:
                sub.add(event)
        else:
            original(self, event)

    return [(ResultPartition, "broadcast", broadcast)]


def watermark_before_rows() -> Replacements:
    """A watermark takes the place of the one before it, before the rows between them."""
    original = ElementQueue.append

    def append(self: Any, item: Any) -> None:
        if isinstance(item, Watermark):
            for index in range(len(self._items) - 1, -1, -1):
                if isinstance(self._items[index], Watermark):
                    self._items[index] = item
                    return
                if not isinstance(self._items[index], LeasedBatch):
                    break
        original(self, item)

    return [(ElementQueue, "append", append)]


def joined_over_a_barrier() -> Replacements:
    """Small batches are joined with those after a barrier."""
    original = ElementQueue._run

    def run(self: Any, first: Any, rows_max: int) -> Any:
        items = self._items
        if len(items) > 1 and isinstance(items[0], CheckpointBarrier) and isinstance(items[1], LeasedBatch):
            barrier = items.popleft()
            found = original(self, first, rows_max)
            items.appendleft(barrier)
            return found
        return original(self, first, rows_max)

    return [(ElementQueue, "_run", run)]


def first_of_a_run_is_lost() -> Replacements:
    """Of batches that are joined, the one that is one row too many is dropped."""
    original = ElementQueue._run

    def run(self: Any, first: Any, rows_max: int) -> Any:
        found = original(self, first, rows_max)
        if len(found) > 1 and self._items and isinstance(self._items[0], LeasedBatch):
            dropped = self._items.popleft()
            self.queued_buffers -= dropped.buffers
            dropped.release()
        return found

    return [(ElementQueue, "_run", run)]


def joined_is_never_done() -> Replacements:
    """Of a batch that came from several channels, only the first has its buffers back when it was processed."""
    original = InputGate.processed

    def done(self: Any) -> None:
        if len(self.read_from) > 1:
            _keep_all_but_the_first(self.current_batch)
        original(self)

    return [(InputGate, "processed", done)]


def joined_with_what_is_blocked() -> Replacements:
    """Rows of a channel that waits for an alignment are processed with those of others."""
    original = InputGate._join

    def join(self: Any, first: Any, rows_max: int) -> Any:
        blocked = [index for index in sorted(self._blocked) if self.channels[index].queue.head_rows(first.layout)]
        self._ready.extend(blocked)
        joined = original(self, first, rows_max)
        for index in blocked:
            self._is_ready[index] = False
            if index in self._ready:
                self._ready.remove(index)
        return joined

    return [(InputGate, "_join", join)]


def joined_without_the_last() -> Replacements:
    """Of the channels whose rows are processed together, those of the last are lost."""
    original = InputGate._join

    def join(self: Any, first: Any, rows_max: int) -> Any:
        joined: Any = original(self, first, rows_max)
        if len(self.read_from) > 1:
            lost = joined._account.parts[-1].batch.num_rows
            joined.batch = joined.batch.slice(0, joined.batch.num_rows - lost)
        return joined

    return [(InputGate, "_join", join)]


def turn_is_lost() -> Replacements:
    """A channel whose last element was an event is not read again before something arrives."""
    original = InputGate.poll

    def poll(self: Any, rows_max: int) -> Any:
        polled = original(self, rows_max)
        if isinstance(polled, tuple) and isinstance(polled[1], Watermark) and self._is_ready[polled[0]]:
            self._is_ready[polled[0]] = False
            self._ready.remove(polled[0])
        return polled

    return [(InputGate, "poll", poll), (InputGate, "check", nothing)]


def opened_before_recovered() -> Replacements:
    """Rows are requested while others are still to be recovered."""

    def ask_now(self: Any) -> None:
        self._has_requested = True
        for channel in self.channels:
            channel.request_rows()

    return [(InputGate, "request_rows", ask_now)]


def split_by_the_wrong_range() -> Replacements:
    """Rows of a key group that two consumers' ranges meet in go to the first of them."""

    def subtask_of(groups: Any, parallelism: int, max_parallelism: int) -> Any:
        return subtask_of_groups((groups - (groups > 0)).astype(groups.dtype), parallelism, max_parallelism)

    return [(partition, "subtask_of", subtask_of)]


MUTATIONS: Final = named(
    Mutation("a resumed channel is not read again", resume_forgets),
    Mutation("a blocked channel is still read", block_nothing),
    Mutation("a buffer of a large batch is never given back", leak_credit),
    Mutation("credit is granted once only", grant_nothing_back),
    Mutation("a batch above the limit of its queue is not granted", rest_is_not_granted),
    Mutation("rows that were read still count as waiting", read_rows_still_wait),
    Mutation("the queue of a slow reader accepts nothing any more", limit_of_nothing),
    Mutation("in-flight data is forgotten at a barrier", drop_an_element),
    Mutation("the end of data overtakes rows", end_overtakes),
    Mutation("credit is announced twice", credit_twice),
    Mutation("part of a batch is kept over a cut", partial_kept_over_a_cut, targeted.cut_short),
    Mutation("buffers are free when a batch is taken", freed_when_taken),
    Mutation("buffers are free when the next batch is processed", freed_with_the_next, targeted.tight),
    Mutation("buffers of joined batches are charged indefinitely", local_batch_never_freed, targeted.tight),
    Mutation("what a checkpoint holds is not charged", captured_is_freed_at_once, targeted.backpressured),
    Mutation("a broadcast skips the last consumer", broadcast_skips_the_last),
    Mutation("watermarks skip the last consumer", watermark_skips_the_last),
    Mutation("a watermark overtakes rows", watermark_before_rows, targeted.on_time),
    Mutation("batches are joined over a barrier", joined_over_a_barrier, targeted.rejoined),
    Mutation("a batch that is one too many to be joined is dropped", first_of_a_run_is_lost),
    Mutation(
        "of channels that are read together one gets its buffers back", joined_is_never_done, targeted.joining_tight
    ),
    Mutation("a blocked channel is read together with others", joined_with_what_is_blocked, targeted.joining),
    Mutation("of channels that are read together the rows of one are lost", joined_without_the_last),
    Mutation("a channel loses its turn after a watermark", turn_is_lost),
    Mutation(
        "rows are requested before what is recovered has been taken", opened_before_recovered, targeted.backpressured
    ),
    Mutation("rows at the border of two ranges go to the wrong subtask", split_by_the_wrong_range),
)
