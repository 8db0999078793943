"""A batch in flight together with its lease: the buffers of the pool that are charged for it.

    queued --take--> current --release--------------------------> over: the account has its buffers back
       |                |                                          ^
       +------hold------+--> held for a checkpoint --release-------+

A lease begins with one holder: the queue that the batch waits in, and then the reader that takes it from there, which
is the gate of a task, or the sender of a remote channel. Each checkpoint that captures the batch holds the lease as
well. Each holder releases it once: the reader when the rows have been processed or sent, a checkpoint when they have
been written or it is abandoned. After the last release the lease is over, and the account frees the buffers.

Batches that are joined become one batch with one lease, which holds the leases of its parts. The same is true of the
rest of a batch that a checkpoint captures after a part of it has been processed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from midstream.engine.core.batches import concat
from midstream.engine.core.elements import Batch, Event
from midstream.engine.core.errors import InvariantError


class Account(Protocol):
    """The account that has charged the buffers of batches to the pool, and releases them."""

    def freed(self, buffers: int) -> None:
        """Release `buffers` buffers, whose lease is over."""
        ...


class LeasedBatch:
    """A batch, for which `buffers` buffers are charged until each of its holders has released it."""

    __slots__ = ("_account", "_holders", "batch", "buffers", "layout", "queued_buffers", "queued_s")

    queued_s: float
    """When the batch was added to its queue. A queue with a `QueueTime` sets this and `queued_buffers`."""
    queued_buffers: int
    """The buffers in the queue when the batch was added, its own included."""

    def __init__(self, batch: Batch, buffers: int, account: Account, layout: int = 0) -> None:
        self.batch = batch
        self.layout = layout
        """The index of its schema in `Edge.layouts`. Only batches of the same layout are joined."""
        self.buffers = buffers
        self._account = account
        self._holders = 1

    def hold(self) -> LeasedBatch:
        """Add a holder to the lease, which must release it. Returns this batch."""
        self._holders += 1
        return self

    def release(self) -> None:
        self._holders -= 1
        if self._holders < 0:
            raise InvariantError("a lease is released more often than it is held")
        if self._holders == 0:
            self._account.freed(self.buffers)

    def rest(self, first_row: int) -> LeasedBatch:
        """The rows from `first_row` on, as a batch that a checkpoint holds."""
        held = self.hold()
        return LeasedBatch(self.batch.slice(first_row), held.buffers, _LeasedParts((held,)), self.layout)

    def charged_to(self, account: Account) -> int:
        """How many of the batch's buffers are charged to `account`."""
        if isinstance(self._account, _LeasedParts):
            return sum(part.charged_to(account) for part in self._account.parts)
        return self.buffers if self._account is account else 0

    def check(self) -> None:
        """Check that the lease has holders and buffers: it is not over."""
        if self._holders < 1 or self.buffers < 1:
            raise InvariantError(
                f"a batch of {self.batch.num_rows} rows is in use with {self.buffers} buffers and {self._holders} holders"
            )
        if isinstance(self._account, _LeasedParts):
            for part in self._account.parts:
                part.check()


class _LeasedParts:
    """The account of a batch that was made of other batches, which are charged to accounts of their own."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[LeasedBatch]) -> None:
        self.parts = parts

    def freed(self, buffers: int) -> None:
        for part in self.parts:
            part.release()


def concat_leased(parts: Sequence[LeasedBatch]) -> LeasedBatch:
    """One batch with the rows of all parts, which have the same layout, in their order. It owns the leases of its
    parts."""
    if len(parts) == 1:
        return parts[0]
    buffers = sum([part.buffers for part in parts])
    return LeasedBatch(concat([part.batch for part in parts]), buffers, _LeasedParts(parts), parts[0].layout)


def release(items: Iterable[LeasedBatch]) -> None:
    for item in items:
        item.release()


def buffers_of(items: Iterable[LeasedBatch | Event]) -> int:
    buffers = 0  # a loop, because there are few items if any, and a generator takes longer to create
    for item in items:
        if isinstance(item, LeasedBatch):
            buffers += item.buffers
    return buffers
