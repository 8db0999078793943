"""Savepoints: made of a checkpoint that is kept until they are, by a job that runs on, or stops with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import xxhash
from coordinator_world import ROOT, SCHEMA, Bench, Ledger, ScriptedSource, restored, two_vertices

from in_memory import MemoryStorage, NeverRun
from midstream.engine.checkpoint.store import load
from midstream.engine.core.config import RestartStrategy
from midstream.engine.core.ids import TaskId
from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, Partitioning, SourceSpec, Vertex
from midstream.engine.protocol import messages as m

READ0, READ1, WRITE0, WRITE1 = TaskId(0, 0), TaskId(0, 1), TaskId(1, 0), TaskId(1, 1)
ALL = (READ0, READ1, WRITE0, WRITE1)
SAVED = "memory://saved"


def parts_in(bench: Bench, checkpoint_id: int) -> Callable[[TaskId], tuple[m.PartHandle, ...]]:
    """State of each task: the whole of the file that it wrote for that checkpoint."""

    def parts(ref: TaskId) -> tuple[m.PartHandle, ...]:
        file = bench.state_file(checkpoint_id, ref)
        checksum = xxhash.xxh3_64_intdigest(b"state")
        return (m.PartHandle("s", "split", (m.ChunkHandle(f"c{ref}", file, 0, 5, checksum, 1),)),)

    return parts


def acknowledge(bench: Bench, checkpoint_id: int) -> None:
    bench.ack(checkpoint_id, *ALL, parts=parts_in(bench, checkpoint_id))


def test_a_savepoint_is_made_of_a_checkpoint_while_the_job_runs_on() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoSavepoint(SAVED))
    assert bench.triggers == [1] and client not in bench.replies
    acknowledge(bench, 1)
    assert bench.replies[client] == m.Reply(checkpoint=SAVED)
    saved = load(bench.elsewhere[SAVED], "bench", "latest")
    assert saved.checkpoint_id == 1 and len(saved.files) == 4
    assert all(bench.elsewhere[SAVED].files[file] == b"state" for file in saved.files)
    assert bench.state == "running" and bench.checkpoint() == 2


def test_without_a_place_it_goes_below_the_checkpoint_directory() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoSavepoint())
    acknowledge(bench, 1)
    assert bench.replies[client].checkpoint == f"{ROOT}/savepoints/1"


def test_its_checkpoint_is_aligned_whatever_the_jobs_timeout() -> None:
    bench = Bench(aligned_timeout_s=0.0).run()
    bench.checkpoint()
    bench.ask(m.DoSavepoint(SAVED))
    assert [trigger.timeout_ms for trigger in bench.messages(m.TriggerCheckpoint)] == [0, 0, None, None]


def test_a_savepoint_asked_for_during_a_checkpoint_is_made_of_the_next() -> None:
    bench = Bench().run()
    bench.ask(m.DoCheckpoint())
    client = bench.ask(m.DoSavepoint(SAVED))
    acknowledge(bench, 1)
    assert client not in bench.replies and bench.triggers == [1, 2]
    acknowledge(bench, 2)
    assert bench.replies[client].checkpoint == SAVED


def test_a_savepoint_asked_for_during_a_restart_is_made_once_the_job_runs_again() -> None:
    bench = Bench().run()
    bench.checkpoint()
    bench.lose(0)
    assert bench.state == "restarting"
    client = bench.ask(m.DoSavepoint(SAVED))
    assert client not in bench.replies
    bench.connect()
    bench.wait(1)
    acknowledge(bench, 2)
    assert bench.replies[client] == m.Reply(checkpoint=SAVED)


def test_it_waits_until_what_it_covers_is_committed_and_refers_to_none_of_it() -> None:
    bench = Bench(held=("commit",)).run()
    client = bench.ask(m.DoSavepoint(SAVED))
    acknowledge(bench, 1)
    assert client not in bench.replies and bench.elsewhere[SAVED].checkpoints() == []
    bench.release("commit")
    assert bench.replies[client].checkpoint == SAVED
    assert load(bench.elsewhere[SAVED], None, "latest").committables == ()


def test_its_checkpoint_is_kept_until_it_is_copied() -> None:
    bench = Bench(held=("savepoint:",), retained_checkpoints=1).run()
    client = bench.ask(m.DoSavepoint(SAVED))
    acknowledge(bench, 1)
    for _ in range(3):
        bench.checkpoint()
    assert 1 in bench.storage.checkpoints()
    bench.release("savepoint:")
    assert bench.replies[client].checkpoint == SAVED
    bench.checkpoint()
    assert bench.storage.checkpoints() == [5]
    assert len(load(bench.elsewhere[SAVED], None, "latest").files) == 4


def test_a_place_that_is_taken_is_refused_before_anything_is_made() -> None:
    full = MemoryStorage()
    full.files["notes.txt"] = b"mine"
    bench = Bench(elsewhere={SAVED: full}).run()
    for request in (m.DoSavepoint(SAVED), m.DoStop(savepoint=SAVED)):
        client = bench.ask(request)
        assert (
            "no savepoint was made: memory://saved: the place is taken (it has notes.txt)"
            in bench.replies[client].error
        )
    assert bench.triggers == [] and bench.state == "running"
    assert full.files == {"notes.txt": b"mine"}


def test_one_that_cannot_be_written_gives_its_place_back_and_the_job_runs_on() -> None:
    small = MemoryStorage()
    small.refuse = lambda path: path.startswith("shared/")
    bench = Bench(elsewhere={SAVED: small}).run()
    client = bench.ask(m.DoSavepoint(SAVED))
    acknowledge(bench, 1)
    assert re.search("no savepoint was made: .*the disk is full", bench.replies[client].error)
    assert small.files == {}
    assert bench.storage.checkpoints() == [1] and bench.checkpoint() == 2


def test_one_whose_files_a_later_coordinator_has_deleted_says_so_and_its_job_ends() -> None:
    bench = Bench(held=("savepoint:",)).run()
    client = bench.ask(m.DoStop(savepoint=SAVED))
    acknowledge(bench, 1)
    bench.storage.create("epochs/00000002", b"")
    for file in [path for path in bench.storage.files if path.startswith("shared/")]:
        bench.storage.delete(file)
    bench.release("savepoint:")
    assert "another coordinator has taken over" in bench.replies[client].error
    assert bench.ended is not None and bench.elsewhere[SAVED].files == {}


@pytest.mark.parametrize("request_", [m.DoSavepoint(SAVED), m.DoStop(savepoint=SAVED)])
@pytest.mark.parametrize("takes_over", ["before it is copied", "while its files are copied", "while it is completed"])
def test_one_that_is_completed_behind_a_later_coordinator_is_none(
    monkeypatch: pytest.MonkeyPatch, request_: m.ClientRequest, takes_over: str
) -> None:
    """The later one may have gone back, and have had the sinks roll back the output that the savepoint relies on."""
    place = MemoryStorage()
    bench = Bench(elsewhere={SAVED: place}, held=("savepoint:",)).run()
    client = bench.ask(request_)
    acknowledge(bench, 1)
    write = place.write
    written: list[str] = []
    moment = {"while its files are copied": "shared/", "while it is completed": "chk-"}.get(takes_over)

    def write_and_be_overtaken(path: str, parts: Iterable[bytes | memoryview]) -> None:
        if moment is not None and path.startswith(moment):
            bench.storage.create("epochs/00000002", b"")
        write(path, parts)
        written.append(path)

    monkeypatch.setattr(place, "write", write_and_be_overtaken)
    if moment is None:
        bench.storage.create("epochs/00000002", b"")
    bench.release("savepoint:")
    assert "another coordinator has taken over" in bench.replies[client].error
    assert bench.ended is not None and place.files == {}
    assert ("chk-1/_metadata" in written) == (takes_over == "while it is completed")


def test_who_asked_is_told_when_the_place_is_free_again_and_the_sources_resume_before() -> None:
    small = MemoryStorage()
    small.refuse = lambda path: path.startswith("chk-")
    bench = Bench(elsewhere={SAVED: small}, held=("savepoint-discard",)).run()
    client = bench.ask(m.DoStop(savepoint=SAVED))
    acknowledge(bench, 1)
    assert bench.messages(m.ResumeSources) == [m.ResumeSources(0, 1)] * 2 and bench.checkpoint() == 2
    assert client not in bench.replies and set(small.files) != set()
    bench.release("savepoint-discard")
    assert bench.replies[client].error.endswith("the job continues") and small.files == {}


def test_the_end_of_the_job_does_not_wait_for_a_place_to_be_given_back_before_it_answers() -> None:
    bench = Bench(held=("savepoint-discard",)).run()
    client = bench.ask(m.DoSavepoint(SAVED))
    bench.say(READ0, m.CheckpointDecline(0, 1, READ0, "no space left", counts=True))
    assert client not in bench.replies
    bench.fail(READ0, fatal=True)
    assert bench.replies[client].error == "no savepoint was made: checkpoint 1 failed: read (subtask 0): no space left"
    bench.release("savepoint-discard")
    assert bench.ended is not None and bench.elsewhere[SAVED].files == {}


def test_a_checkpoint_that_fails_makes_no_savepoint() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoSavepoint(SAVED))
    bench.say(READ0, m.CheckpointDecline(0, 1, READ0, "no space left", counts=True))
    assert bench.replies[client].error == "no savepoint was made: checkpoint 1 failed: read (subtask 0): no space left"
    assert bench.elsewhere[SAVED].files == {} and bench.state == "running"


def test_a_checkpoint_that_only_has_to_be_taken_again_makes_one_then() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoSavepoint(SAVED))
    bench.say(READ0, m.CheckpointDecline(0, 1, READ0, "a task had finished", counts=False))
    bench.wait(0.2)
    acknowledge(bench, 2)
    assert bench.replies[client].checkpoint == SAVED
    assert bench.elsewhere[SAVED].checkpoints() == [2]


def test_a_failure_of_the_job_does_not_disturb_a_savepoint_whose_checkpoint_is_complete() -> None:
    bench = Bench(held=("savepoint:",)).run()
    client = bench.ask(m.DoSavepoint(SAVED))
    acknowledge(bench, 1)
    bench.fail(READ0)
    bench.release("savepoint:")
    assert bench.replies[client].checkpoint == SAVED
    bench.wait(1)
    assert bench.state == "running"


# ---- stopping --------------------------------------------------------------


def test_a_job_stops_with_a_savepoint() -> None:
    bench = Bench(held=("savepoint:",)).run()
    client = bench.ask(m.DoStop(savepoint=SAVED))
    assert all(trigger.pauses_sources for trigger in bench.messages(m.TriggerCheckpoint))
    acknowledge(bench, 1)
    assert bench.ended is None and bench.state == "stopping"
    bench.wait(30)
    assert bench.triggers == [1]
    bench.release("savepoint:")
    assert bench.ended is not None and (bench.ended.state, bench.ended.checkpoint) == ("stopped", SAVED)
    assert bench.replies[client] == m.Reply(checkpoint=SAVED)
    assert bench.sink.committed == [(1, (b"1/0", b"1/1"))]
    assert load(bench.elsewhere[SAVED], "bench", "latest").checkpoint_id == 1


def test_a_job_whose_savepoint_cannot_be_written_does_not_stop_and_its_sources_resume() -> None:
    small = MemoryStorage()
    small.refuse = lambda path: path.startswith("chk-")
    bench = Bench(elsewhere={SAVED: small}).run()
    client = bench.ask(m.DoStop(savepoint=SAVED))
    acknowledge(bench, 1)
    assert re.search("no savepoint was made: .*the disk is full; the job continues", bench.replies[client].error)
    assert bench.messages(m.ResumeSources) == [m.ResumeSources(0, 1)] * 2
    assert bench.state == "running" and bench.status.restarts == 0
    small.refuse = lambda path: False
    again = bench.ask(m.DoStop(savepoint=SAVED))
    acknowledge(bench, 2)
    assert bench.replies[again].checkpoint == SAVED and bench.ended is not None


def test_a_stop_whose_checkpoint_fails_gives_the_place_back() -> None:
    bench = Bench().run()
    client = bench.ask(m.DoStop(savepoint=SAVED))
    bench.say(READ0, m.CheckpointDecline(0, 1, READ0, "no space left", counts=True))
    assert "checkpoint 1 failed: read (subtask 0): no space left; the job continues" in bench.replies[client].error
    assert bench.state == "running" and bench.elsewhere[SAVED].files == {}
    assert bench.messages(m.ResumeSources) == []  # the abort of the checkpoint says it


def test_a_failure_while_the_savepoint_of_a_stop_is_copied_lets_the_job_go_on_from_its_checkpoint() -> None:
    bench = Bench(held=("savepoint:",)).run()
    client = bench.ask(m.DoStop(savepoint=SAVED))
    acknowledge(bench, 1)
    bench.fail(READ0)
    assert client not in bench.replies
    bench.release("savepoint:")
    answer = bench.replies[client].error
    assert answer.startswith("no savepoint was made: ") and answer.endswith("the job continues; the stop is cancelled")
    assert bench.elsewhere[SAVED].files == {}
    bench.wait(1)
    assert bench.state == "running" and bench.status.restored_from == f"{ROOT}/chk-1"


def test_who_stops_with_a_savepoint_is_told_of_a_failure_when_the_place_is_free_again() -> None:
    bench = Bench(held=("savepoint-discard",)).run()
    client = bench.ask(m.DoStop(savepoint=SAVED))
    bench.fail(READ0)
    assert client not in bench.replies and bench.elsewhere[SAVED].files != {}
    bench.release("savepoint-discard")
    assert (
        bench.replies[client].error.endswith("the job continues; the stop is cancelled")
        and bench.elsewhere[SAVED].files == {}
    )


def test_a_failure_while_another_savepoint_is_copied_rolls_back_that_of_the_stop() -> None:
    bench = Bench(held=("savepoint:1",)).run()
    saving = bench.ask(m.DoSavepoint("memory://other"))
    acknowledge(bench, 1)
    stopping = bench.ask(m.DoStop(savepoint=SAVED))
    acknowledge(bench, 2)
    assert bench.elsewhere[SAVED].checkpoints() == [2] and bench.ended is None
    bench.fail(READ0)
    assert (
        "the job continues; the stop is cancelled" in bench.replies[stopping].error
        and bench.elsewhere[SAVED].files == {}
    )
    bench.release("savepoint:1")
    assert bench.replies[saving].checkpoint == "memory://other"
    bench.wait(1)
    assert bench.state == "running"


@pytest.mark.parametrize("request_", [m.DoSavepoint(SAVED), m.DoStop(savepoint=SAVED)])
def test_what_was_still_being_copied_when_the_job_failed_for_good_is_no_savepoint(request_: m.ClientRequest) -> None:
    bench = Bench(held=("savepoint:",)).run()
    client = bench.ask(request_)
    acknowledge(bench, 1)
    bench.fail(READ0, fatal=True)
    bench.release("savepoint:")
    assert bench.ended is not None and bench.ended.state == "failed"
    assert "row 7 is bad" in bench.replies[client].error and bench.elsewhere[SAVED].files == {}


def test_a_failure_before_its_checkpoint_is_triggered_only_delays_a_stop() -> None:
    bench = Bench(restart=RestartStrategy(kind="fixed", attempts=1, delay_s=0.5)).run()
    bench.fail(READ0)
    client = bench.ask(m.DoStop(savepoint=SAVED))
    bench.wait(1)
    acknowledge(bench, 1)
    assert bench.replies[client].checkpoint == SAVED


def test_a_savepoint_that_is_being_copied_is_finished_before_the_job_stops() -> None:
    bench = Bench(held=("savepoint:",)).run()
    saving = bench.ask(m.DoSavepoint(SAVED))
    acknowledge(bench, 1)
    stopping = bench.ask(m.DoStop())
    acknowledge(bench, 2)
    assert bench.ended is None
    bench.release("savepoint:")
    assert bench.replies[saving].checkpoint == SAVED and bench.replies[stopping].checkpoint == f"{ROOT}/chk-2"


def test_what_cannot_be_is_refused() -> None:
    bench = Bench(checkpoint_dir=None).run()
    assert "pass checkpoint_dir" in bench.replies[bench.ask(m.DoSavepoint(SAVED))].error
    assert "pass checkpoint_dir" in bench.replies[bench.ask(m.DoStop(savepoint=SAVED))].error
    bench = Bench().run()
    assert "has finished" in bench.replies[bench.ask(m.DoStop(drain=True, savepoint=SAVED))].error
    bench.ask(m.DoStop())
    for request in (m.DoSavepoint(SAVED), m.DoStop(savepoint=SAVED)):
        assert bench.replies[bench.ask(request)].error == "the job is stopping already"
    assert bench.elsewhere == {}


def test_two_stops_at_once_take_one_place_and_give_the_other_back() -> None:
    bench = Bench(held=("savepoint-location",)).run()
    clients = [bench.ask(m.DoStop(savepoint=place)) for place in (SAVED, "memory://other")]
    bench.release("savepoint-location")
    assert bench.replies[clients[1]].error == "no savepoint was made: the job is stopping already"
    assert bench.elsewhere["memory://other"].files == {}
    acknowledge(bench, 1)
    assert bench.replies[clients[0]].checkpoint == SAVED


def test_the_end_of_the_job_answers_who_waits_for_a_savepoint_and_gives_the_place_back() -> None:
    bench = Bench().run()
    waiting = bench.ask(m.DoSavepoint(SAVED))
    stopping = bench.ask(m.DoStop(savepoint="memory://other"))
    bench.fail(READ0, fatal=True)
    assert bench.ended is not None
    assert "no savepoint was made: " in bench.replies[waiting].error and "row 7 is bad" in bench.replies[waiting].error
    assert "row 7 is bad" in bench.replies[stopping].error
    assert [storage.files for storage in bench.elsewhere.values()] == [{}, {}]


def test_the_end_of_the_job_while_a_place_is_claimed_gives_it_back() -> None:
    bench = Bench(held=("savepoint-location",)).run()
    waiting = bench.ask(m.DoSavepoint(SAVED))
    bench.fail(READ0, fatal=True)
    assert "no savepoint was made: " in bench.replies[waiting].error
    bench.release("savepoint-location")
    assert bench.ended is not None and bench.elsewhere[SAVED].files == {}


def test_a_bounded_job_finishes_its_savepoint_before_it_finishes() -> None:
    bench = Bench(held=("savepoint:",)).run()
    client = bench.ask(m.DoSavepoint(SAVED))
    acknowledge(bench, 1)
    bench.end_of_data(*ALL)
    bench.wait(1)
    bench.ack(2, *ALL, finished=True)
    bench.finish(*ALL)
    assert bench.ended is None
    bench.release("savepoint:")
    assert bench.ended is not None and bench.ended.state == "finished"
    assert bench.replies[client].checkpoint == SAVED


def test_a_job_that_finishes_before_it_can_stop_with_a_savepoint_says_that_there_is_none() -> None:
    bench = Bench().run()
    bench.end_of_data(*ALL)
    bench.ack(1, *ALL, finished=True)
    client = bench.ask(m.DoStop(savepoint=SAVED))
    bench.finish(*ALL)
    assert bench.ended is not None and bench.ended.state == "finished"
    assert bench.replies[client].error == "no savepoint was made: the job has finished"
    assert bench.elsewhere[SAVED].files == {}


# ---- and back --------------------------------------------------------------


def saved_run(checkpoints: int = 0) -> MemoryStorage:
    bench = Bench().run()
    for _ in range(checkpoints):
        bench.checkpoint()
    bench.ask(m.DoSavepoint(SAVED))
    pending = bench.job.checkpoints.pending
    assert pending is not None
    acknowledge(bench, pending.checkpoint_id)
    return bench.elsewhere[SAVED]


def test_a_job_goes_on_from_a_savepoint_in_a_directory_of_its_own_and_leaves_the_savepoint_as_it_was() -> None:
    saved = saved_run(checkpoints=2)
    before = dict(saved.files)
    bench = Bench(restore=SAVED, elsewhere={SAVED: saved}, retained_checkpoints=1).run()
    deployed = bench.messages(m.Deploy)[0]
    tasks = restored(deployed).tasks
    assert deployed.epoch == 1 and len(tasks) == 2
    assert bench.status.restored_from == f"{ROOT}/chk-3"
    files = {c.file for _, ops in tasks for op in ops for part in op.parts for c in part.chunks}
    assert files and all(bench.storage.files[file] == b"state" for file in files)
    assert bench.sink.committed == []
    for _ in range(2):
        bench.checkpoint()
    assert bench.storage.checkpoints() == [5]
    assert saved.files == before


def test_in_a_directory_with_newer_checkpoints_it_becomes_the_newest() -> None:
    saved = saved_run()
    busy = Bench().run()
    for _ in range(4):
        busy.checkpoint()
    again: dict[str, Any] = {"restore": SAVED, "elsewhere": {SAVED: saved}, "job_id": "job2"}
    refused = Bench(storage=busy.storage, **again).start()
    assert "checkpoint 1 is older than what has been committed: sink 'write' possibly" in refused.error
    bench = Bench(storage=busy.storage, newer_output="keep", **again).run()
    assert bench.status.restored_from == f"{ROOT}/chk-5"
    bench.fail(READ0)
    bench.wait(1)
    assert bench.status.restored_from == f"{ROOT}/chk-5"


def test_where_there_is_no_savepoint_it_says_what_there_is() -> None:
    begun = MemoryStorage()
    begun.create("_savepoint", b"{}")
    for there, says in (
        (MemoryStorage(), "there is no such directory, or nothing is in it"),
        (begun, "never completed"),
    ):
        bench = Bench(restore=SAVED, elsewhere={SAVED: there}).start()
        assert f"{SAVED}: " in bench.error and says in bench.error
        assert not bench.requests


def test_a_damaged_savepoint_is_refused() -> None:
    saved = saved_run()
    path = "chk-1/_metadata"
    saved.files[path] = saved.files[path][:-4] + b"oops"
    bench = Bench(restore=SAVED, elsewhere={SAVED: saved}).start()
    assert f"{SAVED}: " in bench.error and "checksum is wrong" in bench.error


def test_what_does_not_fit_is_refused_before_anything_is_copied() -> None:
    graph = two_vertices(ScriptedSource(()), Ledger())
    bench = Bench(JobGraph(graph.vertices, graph.edges, 32), restore=SAVED, elsewhere={SAVED: saved_run()}).start()
    assert "max_parallelism 16, but the job has 32" in bench.error
    assert bench.storage.list("shared") == [] and bench.storage.checkpoints() == []


def test_a_renamed_uid_is_suggested_with_the_size_of_what_would_be_lost() -> None:
    source, sink = ScriptedSource(()), Ledger()
    renamed = JobGraph(
        (
            Vertex(0, 2, SourceSpec("reads", "read", source), ()),
            Vertex(1, 2, None, (OperatorSpec("write", "write", NeverRun(), sink),)),
        ),
        (Edge(0, 0, 1, Partitioning.KEYED, SCHEMA, ("n",)),),
        16,
    )
    bench = Bench(renamed, restore=SAVED, elsewhere={SAVED: saved_run()}).start()
    assert "'read' (read: 10 bytes, 2 rows, the position of a source; was it renamed to 'reads'?)" in bench.error


class Watched(MemoryStorage):
    """Calls `meanwhile` once, as soon as a state file is looked at by somebody else."""

    meanwhile: Callable[[], object] | None = None

    def read_range(self, path: str, offset: int, length: int) -> bytes:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return super().read_range(path, offset, length)


def next_checkpoint(bench: Bench) -> None:
    bench.wait(0.2)
    bench.ask(m.DoCheckpoint())
    acknowledge(bench, bench.triggers[-1])


def test_the_latest_checkpoint_of_a_job_that_runs_is_taken_up_anew_if_it_is_dropped_meanwhile() -> None:
    storage = Watched()
    running = Bench(storage=storage, retained_checkpoints=1, checkpoint_interval_s=None).run()
    next_checkpoint(running)
    storage.meanwhile = lambda: next_checkpoint(running)
    bench = Bench(restore=SAVED, elsewhere={SAVED: storage}).run()
    assert "chk-1/_metadata" not in storage.files, "it was dropped while it was copied"
    assert bench.status.restored_from == f"{ROOT}/chk-2"
    assert bench.status.warnings == ()


def test_a_checkpoint_that_was_named_is_not_replaced_by_a_newer_one() -> None:
    storage = Watched()
    running = Bench(storage=storage, retained_checkpoints=1, checkpoint_interval_s=None).run()
    next_checkpoint(running)
    storage.meanwhile = lambda: next_checkpoint(running)
    bench = Bench(restore=f"{SAVED}/chk-1", elsewhere={SAVED: storage}).start()
    assert "there is no such file" in bench.error
