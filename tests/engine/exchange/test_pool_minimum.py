"""How many buffers a slot needs is known on the driver, and said with settings that would do."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from in_memory import NeverRun, NoRows
from midstream.engine.core.config import JobConfig, size_bytes
from midstream.engine.core.errors import ConfigError
from midstream.engine.exchange.pool_minimum import check_pool, least_buffers
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.worker import deployment as assembly
from midstream.engine.worker.deployment import Deployment
from midstream_lab import run as sim_run
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import draw


def chain(exchanges: int, parallelism: int, partitioning: Partitioning = Partitioning.REBALANCE) -> JobGraph:
    """A source and so many operators behind it, one after the other."""
    vertices = [Vertex(0, parallelism, SourceSpec("read", "read", NoRows()), ())]
    vertices += [
        Vertex(i, parallelism, None, (OperatorSpec(f"o{i}", f"o{i}", NeverRun()),)) for i in range(1, exchanges + 1)
    ]
    schema = pa.schema([("n", pa.int64())])
    edges = [Edge(i, i, i + 1, partitioning, schema) for i in range(exchanges)]
    return JobGraph(tuple(vertices), tuple(edges), 4096)


@pytest.mark.parametrize(
    ("exchanges", "parallelism", "buffers"), [(1, 2, 6), (1, 1024, 3072), (10, 136, 4080), (10, 137, 4110)]
)
def test_an_exchange_takes_three_buffers_for_each_subtask(exchanges: int, parallelism: int, buffers: int) -> None:
    assert {least_buffers(chain(exchanges, parallelism), i) for i in range(parallelism)} == {buffers}


def test_what_stays_in_its_slot_takes_few_whatever_the_parallelism() -> None:
    assert least_buffers(chain(1, 1000, Partitioning.FORWARD), 7) == 3


def test_ten_exchanges_go_up_to_136_subtasks_with_defaults() -> None:
    config = JobConfig()
    check_pool(chain(10, 136), config)
    with pytest.raises(ConfigError) as caught:
        check_pool(chain(10, 137), config)
    assert str(caught.value) == (
        "pool_size: the tasks of one slot need at least 4110 buffers of 32768 bytes (134676480 bytes), as each has a channel "
        "to and from every other one (10 exchanges, up to 137 subtasks), the pool has 4096 (134217728 bytes); set "
        "Tuning(buffer_size='8 KiB'), of which the same pool has more, or give each slot Tuning(pool_size='129 MiB') or more, or lower "
        "the parallelism"
    )


@pytest.mark.parametrize(("exchanges", "parallelism"), [(10, 137), (10, 1000), (2, 1024), (1, 4096)])
def test_each_setting_that_is_named_would_do(exchanges: int, parallelism: int) -> None:
    graph, config = chain(exchanges, parallelism), JobConfig()
    with pytest.raises(ConfigError) as caught:
        check_pool(graph, config)
    named = dict(re.findall(r"(buffer_size|pool_size)='([^']+)'", str(caught.value)))
    assert named.keys() == {"buffer_size", "pool_size"}
    check_pool(graph, JobConfig(buffer_bytes=size_bytes(named["buffer_size"], "")))
    check_pool(graph, JobConfig(pool_bytes=size_bytes(named["pool_size"], "")))


def test_a_smaller_buffer_is_not_named_if_none_would_do() -> None:
    with pytest.raises(ConfigError, match=r"bytes\); give each slot Tuning\(pool_size='12 MiB'\) or more") as caught:
        check_pool(chain(1, 1000), JobConfig(pool_bytes=2**20, buffer_bytes=4096))
    assert "buffer_size=" not in str(caught.value)


def test_slots_reserve_no_more_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the least windows they reserve all of it, but for what is only needed while rows are recovered."""
    seen: list[tuple[int, int, int]] = []

    def build(self: Any, slot_id: int, deploy: Any, loaded: Any, services: Any) -> None:
        original(self, slot_id, deploy, loaded, services)
        graph = next(iter(loaded.graphs.values()), None)
        if graph is not None:
            reserved = sum(quota.reserved for quota in self.pool._quotas)
            inputs = sum(len(graph.inputs(ref.vertex)) for ref in loaded.graphs)
            seen.append((reserved, least_buffers(graph, deploy.slots.index(self.slot_id)), inputs))

    original = Deployment.__init__
    monkeypatch.setattr(Deployment, "__init__", build)
    monkeypatch.setattr(assembly, "WINDOW_BUFFERS_MAX", 2)
    for seed in range(6):
        run(draw(seed))
    assert len(seen) > 20
    assert all(least - inputs <= reserved <= least for reserved, least, inputs in seen), seen
    assert any(reserved > least - inputs for reserved, least, inputs in seen), "nothing was recovered"


@pytest.mark.parametrize("spare", range(8))
def test_every_pool_that_is_large_enough_can_be_deployed(spare: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows grow with the pool, and leave what else is reserved."""

    def buffers(graph: JobGraph) -> int:
        return max(least_buffers(graph, slot) for slot in range(graph.slots)) + spare

    monkeypatch.setattr(sim_run, "least_buffers", buffers)
    for seed in range(4):
        scenario = draw(seed, topology="keyed_broadcast", parallelism=2, rescale_to=4, rows=20)
        assert run(replace(scenario, pool_buffers=0, is_scant=False)).failures == []
