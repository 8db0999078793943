"""What many slots cost: the driver's side against simulated slots, and a job on real ones.

    .venv/bin/python benchmarks/scale.py driver                     # parallelism 64, 256, 1,024 and 4,096
    .venv/bin/python benchmarks/scale.py driver 64 1024 --program-bytes 1000000
    .venv/bin/python benchmarks/scale.py channels                   # one slot with 64, 256 and 1,024 peers
    .venv/bin/python benchmarks/scale.py slots 8 16 32 64           # on an embedded Spark session, small pools

The job is source → key_by → window → sink, two tasks to a slot. `driver` runs its coordinator in the shell that drivers use,
with every message encoded and decoded as on a connection, but without sockets: CPU time of one core, of the loop's thread,
on which heartbeats are, and of the I/O threads. The last column is the exponent of growth between the last two sizes: 1 is
linear, 2 quadratic. `channels` runs one slot alone, fed by peers that are not there. `slots` runs each size in a process of
its own, and leaves out what memory would not do for.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeVar

import msgspec
import psutil
from scale_driver import KEY_GROUPS, PARALLELISMS, Timer, driver

from midstream import Environment, Tuning
from midstream.api.submit import StartOptions
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.elements import CheckpointBarrier, Event, Watermark, encode_event
from midstream.engine.core.ids import ChannelId, TaskId
from midstream.engine.core.interfaces import ConnectionEnd, Done, Failed, Mail
from midstream.engine.core.job_pickle import pickled
from midstream.engine.exchange.frame_layout import FrameKind, header
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from midstream.engine.operators.watermarks import WatermarkStrategy
from midstream.engine.operators.windows.aggregates import Count
from midstream.engine.operators.windows.window_factory import tumbling
from midstream.engine.protocol import messages as m
from midstream.engine.worker.interfaces import SlotServices
from midstream.engine.worker.slot_machine import SlotMachine
from midstream.runtime.concurrent_calls import ConcurrentCalls
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.random_ids import RandomIds
from midstream.runtime.storage.file_storage import FileStorage
from midstream.spark.session import get_session

CHANNELS: Final = (65, 257, 1025)
PROGRAM_BYTES: Final = 10_000
T = TypeVar("T")


# ---- the job


class Writer(SinkWriter):
    """One committable for each checkpoint, as a sink with files has."""

    def __init__(self, subtask: int) -> None:
        self._subtask = subtask

    def write(self, batch: Any) -> None:
        pass

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]]:
        return lambda: [b"%d" % self._subtask]


class Nowhere(Sink, Committer):
    """Drops rows, and commits on the slots: a lane for each subtask."""

    commits_on_slots = True

    def writer(self, context: WriterContext) -> SinkWriter:
        return Writer(context.subtask)

    def committer(self, context: CommitterContext) -> Committer:
        return self

    def lane(self, committable: bytes) -> int:
        return int(committable)

    def commit(self, checkpoint_id: int, committables: Sequence[bytes]) -> None:
        pass


def program(env: Environment, parallelism: int, rows_per_s: float, program_bytes: int) -> None:
    ballast = os.urandom(program_bytes)

    def rows(indices: Any) -> dict[str, Any]:
        assert len(ballast) == program_bytes
        return {"ts": indices.astype("datetime64[ms]").astype("datetime64[us]"), "key": indices * 2654435761 % 10_000}

    (
        env.source(GeneratorSource(rows, rows_per_s=rows_per_s, splits=parallelism))
        .with_watermarks("ts", WatermarkStrategy.monotonous())
        .key_by("key")
        .window(tumbling("1 s"))
        .aggregate(n=Count())
        .sink(Nowhere())
    )


# ---- one slot of many


class Peers:
    """What one slot runs on: a loop that runs until nothing is left to do, and peers that accept everything."""

    core_share = 1.0

    def __init__(self) -> None:
        self.mails: deque[Mail] = deque()
        self.ends: dict[int, ConnectionEnd] = {}
        self.sent: list[m.FromSlot] = []
        self._slot = -1

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()

    own_core_s = stopwatch_s = processor_s = monotonic_s

    def post(self, mail: Mail) -> None:
        self.mails.append(mail)

    def call_later(self, delay_s: float, mail: Mail) -> Timer:
        return Timer(mail)

    def call_at(self, time_ms: int, mail: Mail) -> Timer:
        return Timer(mail)

    def submit(self, work: Callable[[], T], done: Callable[[Done[T] | Failed], None]) -> None:
        found = work()
        self.mails.append(lambda: done(Done(found)))

    def open(self, slot: int, host: str, port: int, attempt: int, end: ConnectionEnd) -> Peers:
        self.ends[slot] = end
        return self

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass

    def run(self) -> None:
        while self.mails:
            self.mails.popleft()()
            if not self.mails:
                for end in self.ends.values():
                    while end.pull(2**20):
                        pass


def measure_channels(parallelism: int) -> dict[str, float]:
    """Slot 0 of so many, with one channel from and to each."""
    with tempfile.TemporaryDirectory(prefix="midstream-scale-") as directory:
        env = Environment(
            "scale",
            parallelism=parallelism,
            max_parallelism=KEY_GROUPS,
            checkpoint_dir=directory,
            checkpoint_interval=None,
        )
        program(env, parallelism, 1000.0, 0)
        plan = env.submission(StartOptions(slots=ProcessSlots())).plan
        peers = Peers()
        machine = SlotMachine(
            SlotServices(
                clock=peers,
                executor=peers,
                ids=RandomIds(),
                transport=peers,
                open_storage=FileStorage,
                send=peers.sent.append,
                make_signal=threading.Event,
                open_calls=ConcurrentCalls(peers).open,
            )
        )
        machine.handle(m.Welcome(0, 1.0, 30.0))
        deploy = m.Deploy(
            plan.job_id,
            0,
            msgspec.msgpack.encode(plan.config),
            pickled(plan.graph),
            tuple(range(parallelism)),
            (TaskId(0, 0), TaskId(1, 0)),
            checkpoint_root=directory,
            epoch=1,
        )
        addresses = tuple(m.Peer(slot, "10.0.0.1", slot) for slot in range(parallelism))
        found: dict[str, float] = {}
        sequence = 0

        def timed(what: str, work: Callable[[], object]) -> None:
            gc.collect()
            began = time.thread_time()
            work()
            peers.run()
            found[what] = (time.thread_time() - began) * 1000

        def from_all(event: Event) -> None:
            nonlocal sequence
            payload = encode_event(event)
            for slot in range(1, parallelism):
                head = header(FrameKind.EVENT, ChannelId(0, slot, 0), sequence, 0, len(payload))
                peers.ends[slot].receive(memoryview((head + payload)[4:]))
            sequence += 1

        gc.collect()
        before = psutil.Process().memory_full_info().uss
        timed(
            "deployed and started", lambda: (machine.handle(deploy), peers.run(), machine.handle(m.Start(0, addresses)))
        )
        assert isinstance(peers.sent[0], m.Deployed), peers.sent
        gc.collect()
        pool = machine.pool
        assert pool is not None
        memory = psutil.Process().memory_full_info().uss - before
        for second in range(2):  # the first one is the first thing that each channel gets
            timed("a watermark of each channel", partial(from_all, Watermark(second * 1_000_000)))
        timed("a heartbeat", lambda: msgspec.msgpack.encode(machine.status()))
        peers.sent.clear()
        trigger = m.TriggerCheckpoint(0, 1, 0, (TaskId(0, 0),))
        timed("a barrier of each channel", lambda: (machine.handle(trigger), from_all(CheckpointBarrier(1, 0, None))))
        assert any(isinstance(each, m.CheckpointAck) for each in peers.sent), peers.sent
        found["objects, MB"] = memory / 1e6
        found["credit and reserve, buffers"] = pool.total - pool.shared_free
        machine.close()
        return found


def channels(sizes: Sequence[int]) -> None:
    measure_channels(sizes[0])
    results = [measure_channels(size) for size in sizes]
    print("| a slot, ms (µs a channel) | " + " | ".join(f"{size - 1:,} peers" for size in sizes) + " |")
    print("|---" * (len(sizes) + 1) + "|")
    for what in results[0]:
        cells = [
            f"{each[what]:,.1f}" if "," in what else f"{each[what]:,.1f} ({each[what] * 1000 / (size - 1):,.1f})"
            for each, size in zip(results, sizes, strict=True)
        ]
        print(f"| {what} | {' | '.join(cells)} |")


# ---- real slots


SLOTS: Final = (8, 16, 32, 64)
POOL: Final = "4 MiB"
SETTLES_S: Final = 3.0
"""What starting leaves behind, such as imports and garbage, is not counted as idle use."""
IDLE_S: Final = 10.0
CHECKPOINTS: Final = 5
MEMORY_SHARE_MAX: Final = 0.6
"""Of what is free: a size that would take more is left out."""


def measure_slots(slots: int) -> dict[str, float]:
    """One size, in a process of its own: a session has the cores that it began with."""
    master = f"local[{slots}]"
    with tempfile.TemporaryDirectory(prefix="midstream-scale-") as directory:
        began = time.perf_counter()
        get_session(master, slots=slots)
        session_s = time.perf_counter() - began
        env = Environment(
            "scale",
            parallelism=slots,
            checkpoint_dir=directory,
            checkpoint_interval=None,
            tuning=Tuning(pool_size=POOL, buffer_size="4 KiB", slot_timeout="5 min", heartbeat_timeout="2 min"),
        )
        program(env, slots, 1.0, PROGRAM_BYTES)
        began = time.perf_counter()
        job = env.start(master=master)
        while (status := job.status()).state != "running":
            if status.has_ended:
                job.wait()
            time.sleep(0.05)
        start_s = time.perf_counter() - began
        time.sleep(SETTLES_S)
        processes = [psutil.Process(pid) for pid in status.slot_pids]
        driver = psutil.Process()
        before, before_driver = [_cpu_s(each) for each in processes], _cpu_s(driver)
        began = time.perf_counter()
        time.sleep(IDLE_S)
        passed_s = time.perf_counter() - began
        idle_s = [_cpu_s(each) - was_s for each, was_s in zip(processes, before, strict=True)]
        driver_s = _cpu_s(driver) - before_driver
        took_ms = []
        for _ in range(CHECKPOINTS):
            began = time.perf_counter()
            job.checkpoint()
            took_ms.append((time.perf_counter() - began) * 1000)
        pss = [each.memory_full_info().pss for each in processes]
        found = {
            "slots": slots,
            "session_s": session_s,
            "start_s": start_s,
            "checkpoint_ms": statistics.median(took_ms),
            "idle_percent": 100 * statistics.mean(idle_s) / passed_s,
            "driver_idle_percent": 100 * driver_s / passed_s,
            "pss_mb": statistics.mean(pss) / 1e6,
            "pss_mb_max": max(pss) / 1e6,
            "pss_mb_all": sum(pss) / 1e6,
            "descriptors": max(each.num_fds() for each in processes),
            "driver_descriptors": driver.num_fds(),
            "threads": max(each.num_threads() for each in processes),
        }
        job.cancel()
        return found


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


HEADS: Final = {
    "slots": "slots",
    "session_s": "Spark session s",
    "start_s": "start to running s",
    "checkpoint_ms": "checkpoint ms",
    "idle_percent": "idle: % of a core, each slot",
    "driver_idle_percent": "the driver",
    "pss_mb": "PSS MB, each slot",
    "pss_mb_max": "the largest",
    "pss_mb_all": "all",
    "descriptors": "descriptors, a slot",
    "driver_descriptors": "the driver",
    "threads": "threads, a slot",
}


def real_slots(sizes: Sequence[int]) -> None:
    print("| " + " | ".join(HEADS.values()) + " |")
    print("|---" * len(HEADS) + "|", flush=True)
    last: dict[str, float] = {}
    for size in sizes:
        if last:
            needed_mb = last["pss_mb"] * size * max(1.0, size / last["slots"] / 2)
            if needed_mb > MEMORY_SHARE_MAX * psutil.virtual_memory().available / 1e6:
                print(f"{size} slots would take some {needed_mb:,.0f} MB, more than is free here", file=sys.stderr)
                return
        command = [sys.executable, __file__, "slots", "--one", str(size)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
        last = json.loads(done.stdout.splitlines()[-1])
        cells = [f"{last[name]:,.2f}" if last[name] < 10 else f"{last[name]:,.0f}" for name in HEADS]
        print("| " + " | ".join(cells) + " |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["driver", "channels", "slots"])
    parser.add_argument("sizes", type=int, nargs="*")
    parser.add_argument("--program-bytes", type=int, default=PROGRAM_BYTES, help="what the job's functions carry")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.part == "driver":
        driver(program, given.sizes or PARALLELISMS, given.program_bytes)
    elif given.part == "channels":
        channels(given.sizes or CHANNELS)
    elif given.one:
        print(json.dumps(measure_slots(given.sizes[0])))
    else:
        real_slots(given.sizes or SLOTS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
