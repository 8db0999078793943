"""Splits are handed out once and are in every checkpoint exactly once; output is committed exactly when it may be."""

from __future__ import annotations

from typing import Any

import msgspec
import pyarrow as pa
import pytest
from coordinator_world import Bench, Ledger, ScriptedSource, two_vertices

from in_memory import MemoryStorage
from midstream.engine.checkpoint.compatibility import dropped_state
from midstream.engine.checkpoint.metadata import Committables, SourcePosition, decode_metadata
from midstream.engine.checkpoint.state_files import store_parts
from midstream.engine.core.elements import MAX_WATERMARK_US, MIN_WATERMARK_US
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.core.ids import TaskId
from midstream.engine.operators.source_api import Split
from midstream.engine.protocol import messages as m
from midstream.engine.state.state_parts import Chunk, Redistribute, StatePart

READ0, READ1, WRITE0, WRITE1 = TaskId(0, 0), TaskId(0, 1), TaskId(1, 0), TaskId(1, 1)
ALL = (READ0, READ1, WRITE0, WRITE1)


def ids(encoded: tuple[bytes, ...]) -> list[str]:
    return [msgspec.msgpack.decode(split, type=Split).id for split in encoded]


def assigned(bench: Bench) -> list[tuple[int, str]]:
    return [(x.task.subtask, ids((x.split,))[0]) for x in bench.messages(m.AssignSplit) if x.attempt == bench.attempt]


def lasts(bench: Bench) -> list[tuple[str, bool]]:
    return [(ids((x.split,))[0], x.waiting_from_us == MAX_WATERMARK_US) for x in bench.messages(m.AssignSplit)]


def told(bench: Bench) -> list[TaskId]:
    return [x.task for x in bench.messages(m.SplitsAssigned)]


def counts(bench: Bench) -> list[tuple[str, int, int]]:
    """The messages about splits, each with its subtask and the number of splits that are assigned."""
    found = []
    for _, x in bench.sent:
        if isinstance(x, m.AssignSplit):
            found.append(("assign", x.task.subtask, x.assigned))
        elif isinstance(x, m.SplitsAssigned):
            found.append(("none" if x.none_waits else "all", x.task.subtask, x.assigned))
    return found


def ask_split(bench: Bench, ref: TaskId) -> None:
    bench.say(ref, m.RequestSplit(bench.attempt, ref))


def sources_of(bench: Bench, checkpoint_id: int) -> SourcePosition:
    return decode_metadata(bench.storage.files[f"chk-{checkpoint_id}/_metadata"], "test").sources[0]


def world(*rounds: tuple[str, ...], **options: object) -> tuple[Bench, ScriptedSource]:
    source = ScriptedSource(*rounds)
    return Bench(two_vertices(source, Ledger()), **options), source  # type: ignore[arg-type]


def test_splits_are_handed_out_in_order_to_whoever_asks_and_then_there_are_no_more() -> None:
    bench, _ = world(("a", "b", "c"))
    bench.run()
    for ref in (READ0, READ1, READ1, READ0, READ1):
        ask_split(bench, ref)
    assert assigned(bench) == [(0, "a"), (1, "b"), (1, "c")]
    assert [x.task for x in bench.messages(m.NoMoreSplits)] == [READ0, READ1]


def test_each_split_comes_with_the_time_from_which_on_others_wait() -> None:
    bench, source = world(("a", "b", "c", "d", "e"))
    source.times = {"a": 70, "b": 30, "c": 50, "d": 40, "e": 60}
    source.following = ("b",)
    bench.run()
    for _ in range(2):
        ask_split(bench, READ0)
    waiting = [x.waiting_from_us for x in bench.messages(m.AssignSplit)]
    assert waiting == [29, 39], "one that follows is waited for, as it is among others"
    bench.checkpoint()
    bench.fail(READ0)
    bench.wait(1)
    for _ in range(3):
        ask_split(bench, READ1)
    assert [x.waiting_from_us for x in bench.messages(m.AssignSplit)][2:] == [39, 59, MAX_WATERMARK_US]
    bench.fail(READ0)
    source.times["d"] = 10  # as the checkpoint has it, it began later
    bench.wait(1)
    ask_split(bench, READ1)
    assert [x.waiting_from_us for x in bench.messages(m.AssignSplit)][5:] == [39]


def test_a_split_whose_time_is_not_known_is_waited_for_altogether() -> None:
    bench, source = world(("a", "b", "c"))
    source.times = {"a": 1, "c": 3}
    bench.run()
    for _ in range(3):
        ask_split(bench, READ0)
    waiting = [x.waiting_from_us for x in bench.messages(m.AssignSplit)]
    assert waiting == [MIN_WATERMARK_US, 2, MAX_WATERMARK_US]


def test_equal_shares_wait_for_those_who_ask_late() -> None:
    bench, source = world(("a", "b", "c"), ("d", "e"))
    source.equal_shares = True
    bench.run()
    for _ in range(3):
        ask_split(bench, READ0)
    assert assigned(bench) == [(0, "a"), (0, "b")], "one of three is left for the other"
    ask_split(bench, READ1)
    assert assigned(bench)[2:] == [(1, "c")]
    ask_split(bench, READ1)
    bench.wait(1)
    assert assigned(bench)[3:] == [(0, "d"), (1, "e")], "who waited longest, but for shares"
    ask_split(bench, READ0)
    ask_split(bench, READ1)
    assert [x.task for x in bench.messages(m.NoMoreSplits)] == [READ0, READ1]


def test_shares_are_those_of_an_attempt() -> None:
    bench, source = world(("a", "b", "c", "d"), ())
    source.equal_shares = True
    bench.run()
    ask_split(bench, READ0)
    ask_split(bench, READ0)
    bench.fail(READ0)
    bench.wait(1)
    for ref in (READ1, READ1, READ1, READ0, READ0):
        ask_split(bench, ref)
    assert assigned(bench) == [(1, "a"), (1, "b"), (0, "c"), (0, "d")]


def test_a_reader_that_asks_too_early_waits_for_the_discovery() -> None:
    bench, source = world(("a",), held=("discover",))
    bench.run()
    ask_split(bench, READ1)
    ask_split(bench, READ0)
    assert assigned(bench) == []
    assert len(bench.waiting) == 1  # never two discoveries at once
    bench.release()
    assert assigned(bench) == [(1, "a")]
    assert [x.task for x in bench.messages(m.NoMoreSplits)] == [READ0]
    assert source.positions == [None]


def test_discovery_goes_on_at_its_interval_from_its_position_until_it_is_exhausted() -> None:
    bench, source = world(("a",), (), ("b", "c"))
    bench.run()
    ask_split(bench, READ0)
    ask_split(bench, READ1)
    assert assigned(bench) == [(0, "a")]
    bench.wait(1)
    assert assigned(bench) == [(0, "a")]
    bench.wait(1)
    assert assigned(bench) == [(0, "a"), (1, "b")]
    bench.wait(10)
    assert source.positions == [None, b"1", b"2"]


def test_nothing_more_is_discovered_while_splits_wait_to_be_handed_out() -> None:
    bench, source = world(("a", "b"), ("c",))
    bench.run()
    ask_split(bench, READ0)
    bench.wait(10)
    assert source.positions == [None]
    ask_split(bench, READ1)
    assert source.positions == [None, b"1"]


def test_every_subtask_is_told_once_of_each_round_that_its_last_split_is_handed_out() -> None:
    bench, _ = world(("a", "b"), ("c",), ("d", "e"))
    bench.run()
    ask_split(bench, READ0)
    assert lasts(bench) == [("a", False)]
    assert told(bench) == []
    ask_split(bench, READ0)
    assert lasts(bench) == [("a", False), ("b", True)]
    assert told(bench) == [READ0, READ1]
    ask_split(bench, READ0)
    bench.wait(1)
    assert lasts(bench)[2:] == [("c", True)]
    assert told(bench) == [READ0, READ1, READ0, READ0, READ1], "the third is the answer to the request that had to wait"
    ask_split(bench, READ1)
    bench.wait(1)
    ask_split(bench, READ1)
    assert lasts(bench)[3:] == [("d", False), ("e", True)]
    assert told(bench)[5:] == [READ1, READ0, READ1]


def test_each_message_has_how_many_splits_are_assigned_to_all_subtasks_together() -> None:
    bench, _ = world(("a", "b"), ("c",))
    bench.run()
    for ref in (READ0, READ1, READ0):
        ask_split(bench, ref)
    assert counts(bench) == [("assign", 0, 1), ("assign", 1, 2), ("all", 0, 2), ("all", 1, 2), ("none", 0, 2)]
    bench.wait(1)
    assert counts(bench)[5:] == [("assign", 0, 3), ("all", 0, 3), ("all", 1, 3)]
    bench.checkpoint()
    bench.fail(READ0)
    bench.wait(1)
    assert counts(bench)[8:10] == [("all", 0, 0), ("all", 1, 0)], "counted from the beginning of the attempt"


def test_a_request_is_answered_once_when_no_split_waits_and_not_before_the_first_are_found() -> None:
    bench, _ = world(("a",), (), (), ("b",), held=("discover",))
    bench.run()
    ask_split(bench, READ0)
    ask_split(bench, READ1)
    assert told(bench) == []
    bench.release()
    assert assigned(bench) == [(0, "a")]
    assert told(bench) == [READ0, READ1, READ1], "both that all are assigned, the second that there is none for it"
    ask_split(bench, READ0)
    bench.wait(1)
    ask_split(bench, READ0)
    assert told(bench)[3:] == [READ0]


def test_a_split_that_follows_all_that_were_found_before_it_is_not_waited_for() -> None:
    bench, source = world(("a", "b", "c"))
    source.following = ("b", "c")
    bench.run()
    for _ in range(3):
        ask_split(bench, READ0)
    assert lasts(bench) == [("a", True), ("b", True), ("c", True)]
    assert counts(bench) == [
        *(("assign", 0, 1), ("all", 0, 1), ("all", 1, 1)),
        *(("assign", 0, 2), ("assign", 0, 3), ("all", 0, 3), ("all", 1, 3)),
    ]


def test_a_split_that_follows_one_of_several_is_waited_for_after_a_restore_too() -> None:
    bench, source = world(("a", "b", "c", "d"))
    source.following = ("b", "d")
    bench.run()
    for _ in range(3):
        ask_split(bench, READ0)
    assert lasts(bench) == [("a", False), ("b", False), ("c", False)]
    bench.checkpoint()
    bench.fail(READ0)
    bench.wait(1)
    assert told(bench) == []
    ask_split(bench, READ0)
    assert lasts(bench)[3:] == [("d", True)]
    assert told(bench) == [READ0, READ1]


def test_that_nothing_was_found_is_told_when_that_is_known() -> None:
    bench, _ = world((), ("a",), held=("discover",))
    bench.run()
    assert told(bench) == []
    bench.release()
    assert told(bench) == [READ0, READ1]


def test_after_a_restore_event_time_waits_for_what_the_checkpoint_had_pending() -> None:
    bench, _ = world(("a", "b"))
    bench.run()
    ask_split(bench, READ0)
    bench.checkpoint()
    ask_split(bench, READ1)
    bench.checkpoint()
    told_before = told(bench)
    bench.fail(READ0)
    bench.wait(1)
    assert told(bench) == [*told_before, READ0, READ1]  # all were handed out in the checkpoint

    bench, _ = world(("a", "b"))
    bench.run()
    ask_split(bench, READ0)
    bench.checkpoint()
    bench.fail(READ0)
    bench.wait(1)
    assert told(bench) == []
    ask_split(bench, READ1)
    assert lasts(bench)[-1] == ("b", True)
    assert told(bench) == [READ0, READ1]


def test_a_checkpoint_holds_the_position_and_what_was_not_handed_out_before_the_trigger() -> None:
    bench, _ = world(("a", "b", "c"))
    bench.run()
    ask_split(bench, READ0)
    bench.ask(m.DoCheckpoint())
    ask_split(bench, READ1)  # after the trigger: in nobody's state, so still pending in the checkpoint
    bench.ack(1, *ALL)
    held = sources_of(bench, 1)
    assert ids(held.pending) == ["b", "c"]
    assert (held.position, held.exhausted) == (b"1", True)
    order = [x for slot, x in bench.sent if slot == 1 and isinstance(x, (m.TriggerCheckpoint, m.AssignSplit))]
    assert isinstance(order[0], m.TriggerCheckpoint)
    assert isinstance(order[1], m.AssignSplit)


def test_after_a_failure_the_splits_of_the_checkpoint_are_handed_out_again() -> None:
    bench, source = world(("a", "b"), ("c",))
    bench.run()
    ask_split(bench, READ0)
    bench.checkpoint()
    ask_split(bench, READ1)
    bench.wait(1)
    ask_split(bench, READ0)
    assert assigned(bench) == [(0, "a"), (1, "b"), (0, "c")]
    bench.fail(READ0)
    bench.wait(1)
    for ref in (READ1, READ0):
        ask_split(bench, ref)
    assert assigned(bench) == [(1, "b"), (0, "c")]
    assert source.positions == [None, b"1", b"1"]


@pytest.mark.parametrize("continues", [True, False])
def test_a_source_that_no_longer_ends_goes_on_where_it_had_ended_if_it_can(continues: bool) -> None:
    bench, source = world(("a",))
    source.continues_past_end = continues
    bench.run()
    bench.checkpoint()
    assert sources_of(bench, 1).exhausted
    source.rounds, source.bounded = (("a",), ("b",)), False
    bench.fail(READ0)
    bench.wait(1)
    ask_split(bench, READ0)
    ask_split(bench, READ1)
    assert source.positions == ([None, b"1"] if continues else [None])
    assert assigned(bench) == ([(0, "a"), (1, "b")] if continues else [(0, "a")])


def test_without_a_checkpoint_discovery_begins_anew_after_a_failure() -> None:
    bench, source = world(("a", "b"))
    bench.run()
    ask_split(bench, READ0)
    bench.fail(READ1)
    bench.wait(1)
    ask_split(bench, READ1)
    assert assigned(bench) == [(1, "a")]
    assert source.positions == [None, None]


def test_a_discovery_of_an_old_attempt_is_waited_for_and_not_used() -> None:
    bench, source = world(("a",), ("b",), held=())
    bench.run()
    ask_split(bench, READ1)
    bench.held = ("discover",)
    bench.wait(1)  # the second discovery is under way
    bench.fail(READ0)
    bench.wait(1)
    ask_split(bench, READ0)
    assert assigned(bench) == []
    assert len(bench.waiting) == 1
    bench.held = ()
    bench.release()
    assert assigned(bench) == [(0, "a")]
    assert source.positions == [None, b"1", None]


def test_a_discovery_that_fails_at_first_fails_the_job() -> None:
    source = ScriptedSource(error=StorageError("cannot list /data: permission denied"))
    bench = Bench(two_vertices(source, Ledger())).start()
    assert "source 'read'" in bench.error
    assert "permission denied" in bench.error
    assert source.closed == 1


def test_a_discovery_that_fails_later_restarts_the_job() -> None:
    bench, source = world(("a",), ("b",))
    bench.run()
    ask_split(bench, READ1)
    source.error = OSError("network is down")
    bench.wait(1)
    assert "OSError: network is down" in bench.status.failures[0].summary
    assert "Traceback" in bench.status.failures[0].details
    source.error = None
    bench.wait(1)
    assert bench.state == "running"
    ask_split(bench, READ0)
    assert assigned(bench) == [(0, "a")]


def test_a_schema_error_in_discovery_is_fatal() -> None:
    bench, source = world(("a",), ("b",))
    bench.run()
    ask_split(bench, READ0)
    source.error = SchemaError("column x is missing")
    bench.wait(1)
    assert "column x is missing" in bench.error


def test_a_drain_gives_nobody_another_split_and_keeps_the_rest_in_the_checkpoint() -> None:
    bench, _ = world(("a", "b"), ("c",))
    bench.run()
    bench.ask(m.DoStop(drain=True))
    ask_split(bench, READ0)
    assert assigned(bench) == []
    assert [x.task for x in bench.messages(m.NoMoreSplits)] == [READ0]
    before = len(bench.triggers)
    bench.wait(60)
    assert len(bench.triggers) == before  # until all tasks are at their end, some would be finished and others not
    assert bench.job.attempt is not None
    bench.end_of_data(*bench.job.attempt.phases)
    held = sources_of(bench, bench.checkpoint(finished=True))
    assert ids(held.pending) == ["a", "b"]
    assert held.position == b"1"


def test_a_discovery_that_fails_while_draining_does_no_harm() -> None:
    bench, source = world(("a",), ("b",))
    bench.run()
    ask_split(bench, READ0)
    bench.held = ("discover",)
    bench.wait(1)
    source.error = OSError("gone")
    bench.ask(m.DoStop(drain=True))
    bench.release()
    assert bench.state == "stopping"
    assert not bench.status.failures


def test_a_source_is_told_what_is_settled_with_all_unfinished_splits() -> None:
    bench, source = world(("a", "b", "c"))
    bench.run()
    ask_split(bench, READ0)
    bench.ask(m.DoCheckpoint())
    handles = stored_splits(bench, Split("a", b"", 7))
    bench.ack(1, READ0, parts=lambda ref: handles)
    bench.ack(1, READ1, WRITE0, WRITE1)
    assert source.settled == [(b"1", ["b", "c", "a"])]


def test_a_source_is_told_that_a_split_is_unfinished_that_a_drain_has_cut_off() -> None:
    bench, source = world(("a",))
    bench.run()
    ask_split(bench, READ0)
    bench.ask(m.DoCheckpoint())
    handles = stored_splits(bench, Split("a", b"", 7))
    bench.ack(1, READ0, parts=lambda ref: handles, finished=True)
    bench.ack(1, READ1, finished=True)
    bench.ack(1, WRITE0, WRITE1)
    assert source.settled == [(b"1", ["a"])]


def stored_splits(bench: Bench, *splits: Split) -> tuple[m.PartHandle, ...]:
    """What READ0 names in its acknowledgement of checkpoint 1 when it has these splits open."""
    table = pa.table({"split": pa.array([msgspec.msgpack.encode(split) for split in splits], pa.binary())})
    part = {"splits": StatePart(Redistribute.SPLIT, (Chunk("x", table),))}
    (handles,) = store_parts(bench.storage, [part], {}, bench.state_file(1, READ0)).parts
    return handles


def test_a_source_that_cannot_be_told_is_warned_about_and_told_again() -> None:
    bench, source = world(("a",))
    bench.run()

    def refuse(position: bytes | None, unfinished: object = None) -> None:
        raise OSError("broker is away")

    type(source).checkpoint_completed, kept = refuse, type(source).checkpoint_completed  # type: ignore[assignment,method-assign]  # replaced for once
    try:
        source.checkpoint_completed = refuse  # type: ignore[method-assign]
        bench.checkpoint()
        del source.checkpoint_completed
    finally:
        type(source).checkpoint_completed = kept  # type: ignore[method-assign]
    assert bench.state == "running"
    assert any("broker is away" in warning for warning in bench.status.warnings)
    bench.checkpoint()
    assert source.settled == [(b"1", ["a"])]


def test_sources_are_not_called_side_by_side() -> None:
    bench, source = world(("a",), ("b",), held=("notify",))
    bench.run()
    ask_split(bench, READ0)
    bench.checkpoint()
    bench.checkpoint()
    assert len(bench.waiting) == 1
    bench.wait(3)
    assert source.positions == [None]
    bench.held = ()
    bench.release()
    assert [position for position, _ in source.settled] == [b"1", b"1"]
    assert source.positions == [None, b"1"]


# ---- committing ------------------------------------------------------------


def test_a_commit_that_fails_is_tried_again_in_order() -> None:
    bench = Bench().run()
    bench.sink.failures = 2
    bench.checkpoint()
    bench.checkpoint()
    assert bench.sink.committed == []
    assert bench.state == "running"
    bench.wait(2)
    assert [n for n, _ in bench.sink.committed] == [1, 2]


def test_what_is_not_committed_yet_is_in_every_later_checkpoint() -> None:
    bench = Bench(held=("commit",)).run()
    bench.checkpoint()
    bench.checkpoint()
    second = decode_metadata(bench.storage.files["chk-2/_metadata"], "test")
    assert [(c.checkpoint_id, c.items) for c in second.committables] == [(1, (b"1/0", b"1/1")), (2, (b"2/0", b"2/1"))]


def test_commits_that_keep_failing_fail_the_attempt_and_nothing_is_deployed_before_they_succeed() -> None:
    bench = Bench().run()
    bench.sink.failures = 7
    bench.checkpoint()
    bench.wait(3.2)
    assert "the target is away" in bench.status.failures[0].summary
    deployed = len(bench.messages(m.Deploy))
    bench.wait(0.5)
    assert len(bench.messages(m.Deploy)) == deployed
    bench.wait(3)
    assert bench.sink.committed == [(1, (b"1/0", b"1/1"))]
    assert bench.state == "running"
    assert bench.status.restored_from == "memory://checkpoints/chk-1"


def test_a_job_that_fails_for_good_because_of_commits_keeps_them_for_the_next_start() -> None:
    bench = Bench()
    bench.run()
    bench.sink.failures = 999
    bench.checkpoint()
    bench.wait(120)
    assert "sink 'write': committing what it wrote up to checkpoint 1 (kept in the checkpoint" in bench.error
    assert "--from latest): OSError: the target is away" in bench.error
    again = Bench(storage=bench.storage, restore="latest", job_id="job2").start()
    assert again.sink.committed == [(1, (b"1/0", b"1/1"))]


def test_the_output_of_the_restored_checkpoint_is_committed_before_anything_is_deployed() -> None:
    first = Bench(held=("commit",)).run()
    first.checkpoint()
    again = Bench(storage=first.storage, restore="latest", job_id="job2", held=("commit",)).start()
    again.connect()
    assert not again.messages(m.Deploy)
    again.release("commit")
    assert again.sink.committed == [(1, (b"1/0", b"1/1"))]
    assert again.state == "running"


def test_output_of_tasks_that_finished_before_a_failure_without_checkpoints_is_cleaned_up() -> None:
    bench = Bench(checkpoint_dir=None).run()
    bench.finish(WRITE0, committables=(("write", (b"zero",)),))
    bench.fail(READ0)
    assert bench.sink.aborted == [b"zero"]
    bench.wait(1)
    assert bench.state == "running"
    assert not bench.sink.committed


# ---- restoring, and another coordinator ------------------------------------


def finished_run(**options: object) -> MemoryStorage:
    """Checkpoints 1 to 3 of a job that was cancelled."""
    bench = Bench(retained_checkpoints=3, **options).run()  # type: ignore[arg-type]
    for _ in range(3):
        bench.checkpoint()
    return bench.storage


def test_latest_an_id_and_a_path_can_be_restored() -> None:
    for restore, expected in (("latest", 3), ("2", 2), ("chk-1", 1), ("memory://checkpoints/chk-2/_metadata", 2)):
        bench = Bench(storage=finished_run(), restore=restore, newer_output="keep").run()
        assert bench.status.restored_from == f"memory://checkpoints/chk-{expected}"
        assert bench.checkpoint() == 4
        assert bench.messages(m.Deploy)[0].epoch == 2


def test_latest_in_an_empty_directory_begins_at_the_beginning_and_says_so() -> None:
    bench = Bench(restore="latest").run()
    assert bench.status.restored_from is None
    assert any("starting from the beginning" in warning for warning in bench.status.warnings)


def test_a_checkpoint_that_is_not_there_names_those_that_are() -> None:
    bench = Bench(storage=finished_run(), restore="9").start()
    assert "checkpoint 9 is not in the checkpoint directory" in bench.error
    assert "1, 2, 3" in bench.error
    assert not bench.requests


def test_a_damaged_newest_checkpoint_is_not_passed_over() -> None:
    for damage in (b"", b"MIDSTRM", b"garbage that is long enough to be a header, but is none at all"):
        storage = finished_run()
        storage.files["chk-3/_metadata"] = damage
        bench = Bench(storage=storage, restore="latest").start()
        assert "checkpoint 3, the newest, cannot be used" in bench.error
        assert "--from 2 --newer-output rollback removes it" in bench.error
        assert not bench.requests
        bench = Bench(storage=storage, restore="2").start()
        assert "sink 'write' possibly (it cannot determine this) up to checkpoint 3" in bench.error
        bench = Bench(storage=storage, restore="2", newer_output="keep").run()
        assert bench.status.restored_from == "memory://checkpoints/chk-2"
        assert any("will be duplicated" in warning for warning in bench.status.warnings)


def test_a_damaged_checkpoint_that_was_named_is_refused() -> None:
    storage = finished_run()
    storage.files["chk-3/_metadata"] = storage.files["chk-3/_metadata"][:-10]
    bench = Bench(storage=storage, restore="3").start()
    assert "truncated" in bench.error
    assert not bench.requests


def test_another_max_parallelism_is_refused() -> None:
    graph = two_vertices(ScriptedSource(()), Ledger())
    other = type(graph)(graph.vertices, graph.edges, 32)
    bench = Bench(other, storage=finished_run(), restore="latest").start()
    assert "max_parallelism 16, but the job has 32" in bench.error


def test_state_of_an_operator_that_is_gone_is_refused_unless_allowed() -> None:
    storage = finished_run()
    graph = two_vertices(ScriptedSource(()), Ledger())
    vertices = (graph.vertices[0], type(graph.vertices[1])(1, 2, None, (_renamed(graph.vertices[1].operators[0]),)))
    other = type(graph)(vertices, graph.edges, 16)
    bench = Bench(other, storage=storage, restore="latest").start()
    assert "'write'" in bench.error
    assert "--allow-dropped-state" in bench.error
    allowed = Bench(other, storage=storage, restore="latest", allow_dropped_state=True).run()
    assert allowed.status.restored_from == "memory://checkpoints/chk-3"


def test_output_that_a_checkpoint_holds_is_not_left_to_what_is_no_sink() -> None:
    storage = finished_run()
    metadata = decode_metadata(storage.files["chk-3/_metadata"], "chk-3")
    held = msgspec.structs.replace(metadata, committables=(Committables(3, "write", "write", (b"x",)),))
    graph = two_vertices(ScriptedSource(()), Ledger())
    spec = graph.vertices[1].operators[0]
    other = type(spec)(spec.uid, spec.name, spec.operator, None)
    vertices = (graph.vertices[0], type(graph.vertices[1])(1, 2, None, (other,)))
    assert dropped_state(held, graph, False) == ()
    with pytest.raises(ConfigError, match="'write' was a sink in checkpoint 3, with output to commit"):
        dropped_state(held, type(graph)(vertices, graph.edges, 16), True)


def _renamed(spec: Any) -> Any:
    return type(spec)("print", "print", spec.operator, spec.sink)


def test_a_coordinator_that_was_superseded_publishes_commits_and_deletes_nothing() -> None:
    old = Bench(held=("publish",)).run()
    old.ask(m.DoCheckpoint())
    old.ack(1, *ALL)
    new = Bench(storage=old.storage, job_id="job2").run()
    new.checkpoint()
    before = dict(old.storage.files)
    old.release("publish")
    assert "another coordinator has taken over" in old.error
    assert old.sink.committed == []
    assert old.sink.aborted == []
    assert old.storage.files == before
    assert new.state == "running"


def test_who_waits_for_a_checkpoint_of_a_superseded_coordinator_is_told() -> None:
    old = Bench(held=("publish",)).run()
    client = old.ask(m.DoCheckpoint())
    for ref in old.tasks:
        old.ack(1, ref)
    Bench(storage=old.storage, job_id="job2").run()
    old.release("publish")
    assert "another coordinator has taken over" in old.replies[client].error
    assert "another coordinator has taken over" in old.error


def test_two_coordinators_never_share_a_state_file_name() -> None:
    first = Bench().run()
    first.checkpoint()
    second = Bench(storage=first.storage, job_id="job2", restore="latest").run()
    assert second.state_file(2, READ0) != first.state_file(2, READ0)
    assert second.job.checkpoints.epoch > first.job.checkpoints.epoch


def test_a_coordinator_that_is_superseded_between_two_commits_leaves_the_second_one_to_its_successor() -> None:
    old = Bench(held=("commit",)).run()
    old.checkpoint()
    old.checkpoint()
    assert old.sink.committed == []
    Bench(storage=old.storage, job_id="job2", restore="latest").run()
    old.release("commit")
    assert old.sink.committed == []
    assert "another coordinator has taken over" in old.error
