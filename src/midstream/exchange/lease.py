"""A batch on its way, together with its lease: the buffers of the pool that are charged for it.

    queued --take--> at work --release--------------------------> over: the account has its buffers back
       |                |                                          ^
       +------hold------+--> held for a checkpoint --release-------+

A lease begins with one holder: the queue that the batch waits in, and then the reader that takes it from there, which
is the gate of a task, or the sender of a remote channel. Each checkpoint that captures the batch holds the lease as
well. Each holder releases it once: the reader when the rows have been processed or sent, a checkpoint when they have
been written or it is given up. After the last release the lease is over, and the account frees the buffers.

Batches that are processed as one are one batch with one lease, which holds the leases of its parts. So is what is left
of a batch that a checkpoint comes upon in the middle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from midstream.core.batches import concat
from midstream.core.elements import Batch, Event
from midstream.core.errors import InvariantError


class Account(Protocol):
    """The account is what batches are charged to: it has taken their buffers from the pool."""

    def freed(self, buffers: int) -> None:
        """A lease on `buffers` buffers is over."""
        ...


class LeasedBatch:
    """A batch, for which `buffers` buffers are charged until each of its holders has released it."""

    __slots__ = ("_account", "_holders", "batch", "buffers", "buffers_waiting", "queued_s")

    queued_s: float
    """When it came into its queue, which sets this and the next if it judges how fast it is read."""
    buffers_waiting: int
    """Buffers in its queue when it came, with its own."""

    def __init__(self, batch: Batch, buffers: int, account: Account) -> None:
        self.batch = batch
        self.buffers = buffers
        self._account = account
        self._holders = 1

    def hold(self) -> LeasedBatch:
        """The same lease, with one more holder, which has to release it."""
        self._holders += 1
        return self

    def release(self) -> None:
        self._holders -= 1
        assert self._holders >= 0, "a lease is released more often than it is held"
        if self._holders == 0:
            self._account.freed(self.buffers)

    def rest(self, first_row: int) -> LeasedBatch:
        """The rows from `first_row` on, held for a checkpoint."""
        held = self.hold()
        return LeasedBatch(self.batch.slice(first_row), held.buffers, _Parts((held,)))

    def charged_to(self, account: Account) -> int:
        """How many of its buffers are those of `account`."""
        if isinstance(self._account, _Parts):
            return sum(part.charged_to(account) for part in self._account.parts)
        return self.buffers if self._account is account else 0

    def check(self) -> None:
        """A lease that is not over has holders and buffers."""
        if self._holders < 1 or self.buffers < 1:
            raise InvariantError(
                f"a batch of {self.batch.num_rows} rows is in use with {self.buffers} buffers and {self._holders} holders"
            )
        if isinstance(self._account, _Parts):
            for part in self._account.parts:
                part.check()


class _Parts:
    """The account of a batch that was made of others: these are charged to their own."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[LeasedBatch]) -> None:
        self.parts = parts

    def freed(self, buffers: int) -> None:
        for part in self.parts:
            part.release()


def joined(parts: Sequence[LeasedBatch]) -> LeasedBatch:
    """The rows of all of them, in that order, with the leases of their reader."""
    if len(parts) == 1:
        return parts[0]
    return LeasedBatch(concat([part.batch for part in parts]), sum([part.buffers for part in parts]), _Parts(parts))


def release(items: Iterable[LeasedBatch]) -> None:
    for item in items:
        item.release()


def buffers_of(items: Iterable[LeasedBatch | Event]) -> int:
    buffers = 0  # a loop: most often there is nothing, or next to nothing, and a generator takes longer to make
    for item in items:
        if isinstance(item, LeasedBatch):
            buffers += item.buffers
    return buffers
