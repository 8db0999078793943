"""What a restart with rows in flight costs the driver, by parallelism: CPU time of each step, one core.

    .venv/bin/python benchmarks/restoring.py                        # parallelism 64 to 1,024
    .venv/bin/python benchmarks/restoring.py 256 --channels 65536   # one parallelism; channels filled, per edge

Two keyed edges with a state on every channel, at most `--channels` on each (262,144: then of 1,024
subtasks each has received something from 256). What is done on the loop, where nothing may hold up
heartbeats (they come every second at most), and what on the I/O pool:

    loop   an acknowledgement comes in; the last one makes the metadata; Deploy messages are sent
    I/O    metadata are encoded; a checkpoint is dealt out and encoded for the slots
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import pyarrow as pa

from midstream.engine.checkpoint.channel_state_references import InFlight
from midstream.engine.checkpoint.metadata import CheckpointMetadata, decode_metadata, encode_metadata
from midstream.engine.checkpoint.redistribute_state import assign_state
from midstream.engine.coordinator.checkpoints.metadata_builder import build_metadata, operator_states, refusal
from midstream.engine.coordinator.checkpoints.pending_checkpoint import PendingCheckpoint
from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.placement.deploy_messages import deployments
from midstream.engine.coordinator.restore.distribute import distribute
from midstream.engine.core.config import JobConfig
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.protocol.messages import (
    ChannelState,
    CheckpointAck,
    ChunkHandle,
    FromSlot,
    OperatorSnapshot,
    PartHandle,
    Segment,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from in_memory import NeverRun, NoRows

PARALLELISMS = (64, 128, 256, 512, 1024)
CHANNELS_MAX = 2**18
KEY_GROUPS = 4096
SCHEMA = pa.schema([("key", pa.int64())])
_decoder: msgspec.msgpack.Decoder[FromSlot] = msgspec.msgpack.Decoder(FromSlot)

T = TypeVar("T")


def graph_of(parallelism: int) -> JobGraph:
    def chain(uid: str) -> tuple[OperatorSpec, ...]:
        return (OperatorSpec(uid, uid, NeverRun()),)

    return JobGraph(
        (
            Vertex(0, parallelism, SourceSpec("read", "read", NoRows()), ()),
            Vertex(1, parallelism, None, chain("count")),
            Vertex(2, parallelism, None, chain("sum")),
        ),
        tuple(Edge(i, i, i + 1, Partitioning.KEYED, SCHEMA, ("key",)) for i in range(2)),
        KEY_GROUPS,
    )


def acknowledgement(graph: JobGraph, task: TaskId, producers: int) -> CheckpointAck:
    """A chunk of state, and a segment from each of so many producers."""
    vertex = graph.vertices[task.vertex]
    uid = vertex.specs[0].uid
    if vertex.source is not None:
        return CheckpointAck(0, 1, task, (OperatorSnapshot(uid),), (), 0)
    name = f"shared/e1-a0-c1-v{task.vertex}-s{task.subtask}"
    low, high = (KEY_GROUPS * (task.subtask + i) // vertex.parallelism for i in range(2))
    chunk = ChunkHandle(f"c{task.subtask}", f"{name}.state", 0, 1000, 77_777, 100, low, high - 1)
    channels = tuple(
        ChannelState(
            task.vertex - 1,
            producer,
            task.subtask,
            False,
            (Segment(f"{name}.channels", producer * 30_000, 30_000, producer * 77_777_777_777, 3, 900),),
        )
        for producer in range(producers)
    )
    parts = (PartHandle("parts", "keyed", (chunk,)),)
    files = (f"{name}.state", f"{name}.channels")
    return CheckpointAck(0, 1, task, (OperatorSnapshot(uid, parts),), files, 1000, channels=channels)


def timed(work: Callable[[], T]) -> tuple[T, float]:
    gc.collect()
    began = time.thread_time()
    found = work()
    return found, (time.thread_time() - began) * 1000


def measure(parallelism: int, channels_max: int) -> list[float]:
    graph = graph_of(parallelism)
    config = JobConfig(parallelism=parallelism, max_parallelism=KEY_GROUPS, checkpoint_dir="memory://checkpoints")
    plan = JobPlan(job_id="job", graph=graph, graph_bytes=b"x" * 10_000, config=config)
    producers = min(parallelism, channels_max // parallelism)
    acks: dict[TaskId, CheckpointAck] = {}
    in_flight = InFlight()
    longest_ack = 0.0
    for vertex in range(3):
        for subtask in range(parallelism):
            encoded = msgspec.msgpack.encode(acknowledgement(graph, TaskId(vertex, subtask), producers))
            began = time.thread_time()
            ack = _decoder.decode(encoded)
            assert isinstance(ack, CheckpointAck)
            acks[ack.task] = ack
            in_flight.add(ack.channels)
            longest_ack = max(longest_ack, (time.thread_time() - began) * 1000)

    first = Attempt(0, graph, tuple(range(parallelism)), ())
    pending = PendingCheckpoint(1, first, 0, first.plan_checkpoint(), (), (), False, False, False, acks, in_flight)

    def complete() -> CheckpointMetadata:
        operators = operator_states(plan, acks, frozenset(), None)
        assert not refusal(operators, in_flight.files, {file for ack in acks.values() for file in ack.files})
        return build_metadata(plan, pending, epoch=1, completed_ms=1, operators=operators, committables=())

    metadata, complete_ms = timed(complete)
    data, encode_ms = timed(lambda: encode_metadata(metadata))
    acks.clear()
    restored, decode_ms = timed(lambda: decode_metadata(data, "benchmark"))
    _, assign_ms = timed(lambda: assign_state(restored, graph))
    dealt, deal_ms = timed(lambda: distribute(restored, plan))
    attempt = Attempt(1, graph, tuple(range(parallelism)), ())
    sent, deploy_ms = timed(
        lambda: sum(
            len(msgspec.msgpack.encode(deploy))
            for _, deploy in deployments(plan, attempt, dealt, 1, lambda _, graph: graph)
        )
    )
    states = len(restored.channels)
    return [states, longest_ack, complete_ms, deploy_ms, encode_ms, decode_ms, assign_ms, deal_ms, len(data), sent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parallelism", type=int, nargs="*", default=PARALLELISMS)
    parser.add_argument("--channels", type=int, default=CHANNELS_MAX)
    given = parser.parse_args()
    print(
        "| parallelism | states | ack ms | complete ms | deploy ms | encode ms | decode ms | assign ms | deal ms | MB | sent MB |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for parallelism in given.parallelism:
        states, *took, stored, sent = measure(parallelism, given.channels)
        figures = " | ".join(f"{ms:.1f}" for ms in took)
        print(f"| {parallelism:,} | {states:,} | {figures} | {stored / 1e6:.1f} | {sent / 1e6:.1f} |", flush=True)


if __name__ == "__main__":
    main()
