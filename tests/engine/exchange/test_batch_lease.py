"""A lease is over, and its buffers are free, when each of its holders has released it, and not before."""

from __future__ import annotations

import pytest
from test_element_queue import Freed, forward, numbers
from test_exchange import batch

from midstream.engine.core.errors import InvariantError
from midstream.engine.exchange.batch_lease import LeasedBatch, concat_leased
from midstream.engine.exchange.buffer_pool import BufferPool
from midstream.engine.exchange.input_channel import LocalChannel
from midstream.engine.exchange.input_gate import InputGate


def test_buffers_are_free_when_the_reader_and_every_checkpoint_have_released_them() -> None:
    account = Freed()
    leased = LeasedBatch(batch(0, 3), 2, account)
    first, second = leased.hold(), leased.hold()
    for holder in (first, leased):
        holder.release()
        assert account.buffers == 0
        leased.check()
    second.release()
    assert account.buffers == 2
    with pytest.raises(InvariantError, match="a batch of 3 rows is in use with 2 buffers and 0 holders"):
        leased.check()
    with pytest.raises(InvariantError, match="released more often than it is held"):
        leased.release()


def test_the_rest_of_a_batch_outlives_its_reader() -> None:
    account = Freed()
    leased = LeasedBatch(batch(0, 3), 2, account)
    rest = leased.rest(1)
    assert numbers([rest]) == [1, 2] and rest.buffers == 2
    leased.release()
    rest.check()
    assert account.buffers == 0
    rest.release()
    assert account.buffers == 2


def test_batches_that_are_read_as_one_are_released_as_one_each_to_its_account() -> None:
    accounts = [Freed(), Freed()]
    parts = [LeasedBatch(batch(n, 1), n + 1, accounts[n % 2]) for n in range(3)]
    captured = parts[2].hold()
    whole = concat_leased(parts)
    assert numbers([whole]) == [0, 1, 2] and whole.buffers == 6
    assert [whole.charged_to(account) for account in accounts] == [4, 2]
    rest = whole.rest(2)
    assert numbers([rest]) == [2] and rest.charged_to(accounts[1]) == 2
    whole.release()
    assert [account.buffers for account in accounts] == [0, 0]
    rest.release()
    assert [account.buffers for account in accounts] == [1, 2], "one of them is captured by itself"
    captured.release()
    assert [account.buffers for account in accounts] == [4, 2]


def test_one_batch_alone_is_not_copied() -> None:
    leased = LeasedBatch(batch(0, 1), 1, Freed())
    assert concat_leased([leased]) is leased


def test_a_gate_finds_that_what_it_has_at_work_is_not_charged_any_more() -> None:
    pool = BufferPool(1 << 20, 4096)
    partition = forward(pool)
    channel = LocalChannel(partition.subpartitions[0])
    gate = InputGate(partition.edge, 0, [channel])
    gate.request_rows()
    partition.emit(batch(0, 1))
    polled = gate.poll(1)
    assert isinstance(polled, LeasedBatch)
    gate.check()
    with pytest.raises(InvariantError, match="polled before the current batch was processed"):
        gate.poll(1)
    polled.release()
    with pytest.raises(InvariantError, match="0 holders"):
        gate.check()
    polled.hold()
    with pytest.raises(InvariantError, match="0 buffers are charged, 1 are in use"):
        gate.check()
