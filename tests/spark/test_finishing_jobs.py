"""Sources that end, stops with a savepoint or a drain, and a final checkpoint that is struck: on real Spark slots."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import Held, check_gapless
from machine import limit_s
from midstream import CollectSink, Environment, KeyedProcessFunction, Tuning, ValueState
from midstream.cli.commands.inspect_checkpoint import read_report
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.arrow_types import to_list
from midstream.engine.operators.sink_api import Committer, CommitterContext, Sink, SinkWriter, WriterContext
from midstream.runtime.driver.job import Job
from midstream.spark.spark_slots import SparkSlots
from waiting import until

pytestmark = pytest.mark.spark

KEYS = 7


class Counts(KeyedProcessFunction):
    """Numbers the rows of each key."""

    seen = ValueState(pa.int64(), default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.seen.value += 1
        return {"k": row["k"], "nth": self.seen.value}


def numbered(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """What `Counts` makes of the rows of these numbers."""
    rows = Counter(n % KEYS for n in numbers)
    return sorted((k, nth) for k in range(KEYS) for nth in range(1, rows[k] + 1))


def has_no_gaps(rows: list[tuple[int, int]]) -> bool:
    """Whether the rows of each key are numbered from 1 on, each number once."""
    return all(
        [nth for key, nth in rows if key == k] == list(range(1, 1 + sum(key == k for key, _ in rows)))
        for k in range(KEYS)
    )


def written(out: Path) -> list[tuple[int, int]]:
    return sorted((row["k"], row["nth"]) for file in out.glob("*.parquet") for row in pq.read_table(file).to_pylist())


def test_checkpoints_go_on_after_one_of_two_sources_has_ended_and_are_restored(
    spark: Any, tmp_path: Path, running: list[Job]
) -> None:
    state, rest = tmp_path / "state", tmp_path / "rest"
    env = Environment(
        "ends", parallelism=2, checkpoint_dir=state, checkpoint_interval="200 ms", tuning=Tuning(batch_rows=100)
    )
    short = env.generate(lambda i: {"k": i % KEYS}, count=70).uid("short")
    long = env.source(Held(GeneratorSource(lambda i: {"k": i % KEYS}, 60_000), rest, first=10_000)).uid("long")
    counted = short.union(long).key_by("k").process(Counts(), {"k": int, "nth": int}).uid("counts")
    counted.write_parquet(tmp_path / "out").uid("out")
    job = env.start(slots=SparkSlots(spark))
    running.append(job)

    def ended() -> bool:
        return job.status().checkpoints_completed > 0 and any(
            operator.uid == "short" and operator.finished_subtasks for operator in read_report(str(state)).operators
        )

    until("a checkpoint in which a source has ended", ended, 60)
    os.kill(job.status().slot_pids[0], signal.SIGKILL)
    until("the restart", lambda: job.status().restarts)
    rest.touch()
    status = job.wait(limit_s(60))
    assert status.state == "finished" and status.restarts == 1
    assert status.restored_from is not None
    assert written(tmp_path / "out") == numbered([*range(70), *range(60_000)])


def test_a_job_stops_with_a_savepoint_goes_on_at_another_parallelism_and_drains(
    spark: Any, tmp_path: Path, running: list[Job]
) -> None:
    def start(state: str, out: str, parallelism: int, restore: str | None) -> Job:
        env = Environment("upgraded", parallelism=parallelism, checkpoint_dir=tmp_path / state)
        rows = env.generate(lambda i: {"k": i % KEYS, "n": i}, rows_per_s=3_000).uid("rows")
        rows.write_parquet(tmp_path / f"{out}-read").uid("read")
        counted = rows.key_by("k").process(Counts(), {"k": int, "nth": int}).uid("counts")
        counted.write_parquet(tmp_path / out).uid("out")
        job = env.start(slots=SparkSlots(spark), restore_from=restore)
        running.append(job)
        return job

    def ran(job: Job, rows: int) -> None:
        until("some rows", lambda: any(o.rows_in >= rows for v in job.status().vertices for o in v.operators), 60)

    def read(out: str) -> list[int]:
        return to_list(pq.read_table(tmp_path / f"{out}-read").column("n"))

    job = start("state", "out", 2, None)
    ran(job, 2_000)
    assert job.stop(savepoint=tmp_path / "saved", timeout_s=limit_s(60)) == str(tmp_path / "saved")
    before, saved = written(tmp_path / "out"), read("out")
    assert len(before) >= 2_000 and has_no_gaps(before)

    (tmp_path / "saved").rename(tmp_path / "moved")
    (tmp_path / "state").rename(tmp_path / "gone")
    job = start("next", "out", 3, str(tmp_path / "moved"))
    ran(job, 1_000)
    job.stop(drain=True, timeout_s=limit_s(60))
    assert job.status().state == "finished"
    after = written(tmp_path / "out")
    assert len(after) >= len(before) + 1_000 and has_no_gaps(after)
    check_gapless(read("out"))
    assert after == numbered(read("out"))
    assert start("next", "out", 2, "latest").wait(limit_s(60)).state == "finished"
    assert written(tmp_path / "out") == after

    fork = start("fork", "rest", 3, str(tmp_path / "moved"))
    ran(fork, 1_000)
    fork.stop(drain=True, timeout_s=limit_s(60))
    assert fork.status().state == "finished"
    numbers = [*saved, *read("rest")]
    check_gapless(numbers)
    assert sorted(before + written(tmp_path / "rest")) == numbered(numbers)


class StruckSink(Sink):
    """Collects; once `armed` is there, the next slot to prepare a commit is killed, `before` or after it has done so."""

    def __init__(self, armed: Path, before: bool) -> None:
        self.inner = CollectSink()
        self.armed = armed
        self.before = before

    def validate(self, schema: pa.Schema, restoring: bool) -> None:
        self.inner.validate(schema, restoring)

    def writer(self, context: WriterContext) -> SinkWriter:
        return StruckWriter(self, self.inner.writer(context))

    def committer(self, context: CommitterContext) -> Committer | None:
        return self.inner.committer(context)


class StruckWriter(SinkWriter):
    def __init__(self, sink: StruckSink, inner: SinkWriter) -> None:
        self.sink = sink
        self.inner = inner

    def write(self, batch: pa.RecordBatch) -> None:
        self.inner.write(batch)

    def prepare(self, checkpoint_id: int) -> Callable[[], Sequence[bytes]] | None:
        work = self.inner.prepare(checkpoint_id)
        if work is None:
            return None

        def struck() -> Sequence[bytes]:
            committables = () if self.sink.before else work()
            try:
                self.sink.armed.unlink()
            except FileNotFoundError:
                return work() if self.sink.before else committables
            os.kill(os.getpid(), signal.SIGKILL)
            return committables

        return struck


@pytest.mark.parametrize("before", [True, False])
def test_a_bounded_job_killed_in_its_final_checkpoint_commits_every_row_once(
    spark: Any, tmp_path: Path, running: list[Job], before: bool
) -> None:
    state, rest = tmp_path / "state", tmp_path / "rest"
    env = Environment(
        "final", parallelism=2, checkpoint_dir=state, checkpoint_interval=None, tuning=Tuning(batch_rows=100)
    )
    sink = StruckSink(tmp_path / "armed", before)
    rows = env.source(Held(GeneratorSource(lambda i: {"k": i % KEYS}, 60_000), rest, first=10_000)).uid("rows")
    rows.key_by("k").process(Counts(), {"k": int, "nth": int}).uid("counts").sink(sink).uid("out")
    job = env.start(slots=SparkSlots(spark))
    running.append(job)
    until("some rows", lambda: any(o.rows_in >= 500 for v in job.status().vertices for o in v.operators), 60)
    first = job.checkpoint()
    (tmp_path / "armed").touch()  # there is no other checkpoint from here on but the final one
    rest.touch()
    status = job.wait(limit_s(60))
    assert not (tmp_path / "armed").exists()
    assert status.state == "finished" and status.restarts == 1
    assert status.restored_from == first
    assert sorted((row["k"], row["nth"]) for row in sink.inner.rows()) == numbered(range(60_000))
