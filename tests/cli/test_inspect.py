"""`midstream inspect`: what it tells of a good checkpoint, and how it names what is wrong with a bad one."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from midstream.cli.main import main
from midstream.engine.checkpoint.channel_state import Captured, store_channels
from midstream.engine.checkpoint.metadata import (
    CheckpointMetadata,
    Committables,
    EdgeLayout,
    OperatorState,
    SourcePosition,
    VertexLayout,
    decode_metadata,
    encode_metadata,
)
from midstream.engine.checkpoint.state_files import channel_file, state_file, store_parts
from midstream.engine.checkpoint.store import claim_directory, publish, take_epoch
from midstream.engine.operators.source_api import Split
from midstream.engine.protocol.messages import OperatorSnapshot
from midstream.engine.state.state_parts import KEY_GROUP, Chunk, Redistribute, StatePart
from midstream.runtime.storage.file_storage import FileStorage


def make_checkpoint(root: Path) -> Path:
    """A source in the middle of one split, a window operator with 3 rows of state, a sink with 2 committables.

    From the window to the sink 7 rows are in flight: 5 that had arrived, 2 that had not.
    """
    storage = FileStorage(str(root))
    claim_directory(storage, "flights")
    epoch = take_epoch(storage, "0123456789abcdef")
    split = msgspec.msgpack.encode(Split("part-7.parquet", b"", 4096))
    states = {
        "read": {
            "splits": StatePart(Redistribute.SPLIT, (Chunk("a", pa.table({"split": pa.array([split], pa.binary())})),))
        },
        "window": {
            "panes": StatePart(
                Redistribute.KEYED,
                (Chunk("b", pa.table({KEY_GROUP: pa.array([1, 2, 3], pa.int32()), "sum": [1.0, 2.0, 3.0]})),),
            )
        },
    }
    file = state_file(epoch, 0, 1, 0, 0)
    stored = store_parts(storage, list(states.values()), {}, file)
    snapshots = {uid: OperatorSnapshot(uid, parts) for uid, parts in zip(states, stored.parts, strict=True)}
    in_flight = channel_file(epoch, 0, 1, 1, 0)
    rows = pa.record_batch({"n": pa.array([1, 2, 3, 4, 5])})
    captured = (Captured(0, 0, 0, False, (rows,)), Captured(0, 0, 1, True, (rows.slice(0, 1), rows.slice(1, 1))))
    channels, written = store_channels(storage, captured, in_flight, 2**20)
    publish(
        storage,
        CheckpointMetadata(
            job_name="flights",
            job_id="0123456789abcdef",
            checkpoint_id=1,
            epoch=epoch,
            attempt=0,
            created_ms=1_700_000_000_000,
            completed_ms=1_700_000_000_250,
            max_parallelism=128,
            vertices=(
                VertexLayout(0, "read → window", 1, ("read", "window"), "read"),
                VertexLayout(1, "write", 2, ("write",), None),
            ),
            edges=(EdgeLayout(0, 0, 1, "rebalance", (), 0, None, ()),),
            operators=(
                OperatorState("read", "read files", 0, 1, (snapshots["read"],)),
                OperatorState("window", "window", 0, 1, (snapshots["window"],)),
                OperatorState("write", "write", 1, 2, (OperatorSnapshot("write"),) * 2),
            ),
            sources=(SourcePosition("read", b"x", False, (split, split)),),
            committables=(Committables(1, "write", "write", (b"abc", b"de")),),
            state_bytes=stored.written.stored_bytes + written.stored_bytes,
            files=tuple(sorted((file, in_flight))),
            channels=channels,
        ),
    )
    return root / "chk-1"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return make_checkpoint(tmp_path / "job")


def test_people_see_operators_sources_and_committables(checkpoint, capsys):
    assert main(["inspect", str(checkpoint)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "checkpoint 1 of job flights" in out
    assert "took 250 ms" in out
    assert "panes keyed 3" in out
    assert "source read: 2 splits waiting, 1 being read part-7.parquet at 4,096" in out
    assert "sink write: 2 prepared in checkpoint 1, 5 B" in out
    assert "window → write rebalance 7" in out
    assert "0 → 0 consumer 5" in out
    assert "0 → 1 producer 2" in out
    assert "verified: every checksum" in out


def test_a_channel_is_listed_once_and_what_consumers_share_is_counted_once(tmp_path, capsys):
    checkpoint = make_checkpoint(tmp_path / "job")
    metadata = decode_metadata((checkpoint / "_metadata").read_bytes(), "")
    arrived, sent = metadata.channels
    shares = [
        msgspec.structs.replace(arrived, consumer=consumer, key_groups=groups, number=4)
        for consumer, groups in enumerate([(0, 64), (64, 128)])
    ]
    again = (*shares, msgspec.structs.replace(sent, consumer=0), sent)
    (checkpoint / "_metadata").write_bytes(encode_metadata(msgspec.structs.replace(metadata, channels=again)))
    assert main(["inspect", str(checkpoint), "--json"]) == 0
    (edge,) = json.loads(capsys.readouterr().out)["in_flight"]
    assert [(c["producer"], c["consumer"], c["stored_by"], c["rows"], c["partial"]) for c in edge["channels"]] == [
        (0, 0, "both", 7, True),
        (0, 1, "both", 7, True),
    ]
    (length,) = (segment.length for segment in arrived.segments)
    assert (edge["rows"], edge["bytes"]) == (9, length + 2 * sent.segments[0].length)


def test_a_savepoint_that_is_damaged_is_not_said_to_be_skipped(checkpoint, capsys):
    root = checkpoint.parent
    (root / "_savepoint").write_text("{}")
    next(root.glob("shared/*")).unlink()
    assert main(["inspect", str(root)]) == 2
    err = capsys.readouterr().err
    assert "this savepoint cannot be used: chk-1: its state file shared/" in err
    assert "skipped" not in err and "older" not in err


def test_a_savepoint_is_called_one_and_one_that_was_never_completed_too(checkpoint, capsys):
    root = checkpoint.parent
    (root / "_savepoint").write_text("{}")
    assert main(["inspect", str(root)]) == 0
    assert "savepoint 1 of job flights" in " ".join(capsys.readouterr().out.split())
    (checkpoint / "_metadata").unlink()
    assert main(["inspect", str(root)]) == 2
    assert "a savepoint was begun here and never completed" in capsys.readouterr().err


@pytest.mark.parametrize("suffix", ["", "/", "/_metadata", "/.."])
def test_machines_get_the_same_for_every_way_to_name_it(checkpoint, suffix, capsys):
    assert main(["inspect", f"{checkpoint}{suffix}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["checkpoint_id"] == 1
    assert report["problems"] == []
    assert [op["rows"] for op in report["operators"]] == [1, 3, 0]
    assert report["operators"][1]["parts"][0]["redistribute"] == "keyed"
    assert report["sources"][0]["splits_in_progress"] == [{"id": "part-7.parquet", "offset": 4096}]
    assert report["committables"][0]["count"] == 2
    (edge,) = report["in_flight"]
    assert (edge["source"], edge["target"], edge["rows"], edge["bytes"]) == ("window", "write", 7, edge["bytes"])
    assert [(c["producer"], c["consumer"], c["stored_by"], c["rows"], c["batches"]) for c in edge["channels"]] == [
        (0, 0, "consumer", 5, 1),
        (0, 1, "producer", 2, 2),
    ]
    assert report["in_flight_rows"] == 7
    assert report["in_flight_bytes"] == edge["bytes"] > 0
    assert report["verified_bytes"] == report["state_bytes"] > 0


def test_a_relative_name_is_found_in_the_working_directory(checkpoint, monkeypatch, capsys):
    monkeypatch.chdir(checkpoint.parent)
    assert main(["inspect", "chk-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] == "./chk-1"


def test_a_damaged_state_file_is_named_with_its_operator(checkpoint, capsys):
    (file,) = (checkpoint.parent / "shared").glob("*.state")
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)
    assert main(["inspect", str(checkpoint)]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "damaged: chk-1, operator 'window'" in out
    assert file.name in out
    assert "checksum is wrong" in out
    assert "verified" not in out


def test_a_damaged_channel_file_is_named_with_its_channel(checkpoint, capsys):
    (file,) = (checkpoint.parent / "shared").glob("*.channels")
    data = bytearray(file.read_bytes())
    data[len(data) // 4] ^= 1
    file.write_bytes(data)
    assert main(["inspect", str(checkpoint), "--json"]) == 2
    (problem,) = json.loads(capsys.readouterr().out)["problems"]
    assert "in-flight data of edge 0, subtask 0 to 0" in problem
    assert f"{file.name} (bytes 0 to" in problem
    assert "checksum is wrong" in problem


def test_a_damaged_small_file_of_the_directory_is_named(checkpoint, capsys):
    for name in ("_job", "epochs/00000001", "chk-1/_owner"):
        path = checkpoint.parent / name
        before = path.read_bytes()
        path.write_bytes(before.replace(b'"checksum"', b'"chacksum"'))
        assert main(["inspect", str(checkpoint), "--json"]) == 2
        (problem,) = json.loads(capsys.readouterr().out)["problems"]
        assert problem.startswith(f"{name}: not what midstream writes there")
        path.write_bytes(before)


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["inspect", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    assert err.startswith("error: ")
    return " ".join(err.split())


def test_a_missing_state_file_is_named(checkpoint, capsys):
    (file,) = (checkpoint.parent / "shared").glob("*.state")
    file.unlink()
    assert f"its state file shared/{file.name} is missing" in refused([str(checkpoint)], capsys)


def test_truncated_metadata_is_refused(checkpoint, capsys):
    metadata = checkpoint / "_metadata"
    metadata.write_bytes(metadata.read_bytes()[:-5])
    assert "chk-1/_metadata: truncated" in refused([str(checkpoint)], capsys)


def test_metadata_with_a_flipped_bit_is_refused(checkpoint, capsys):
    metadata = checkpoint / "_metadata"
    data = bytearray(metadata.read_bytes())
    data[40] ^= 4
    metadata.write_bytes(data)
    assert "the checksum is wrong" in refused([str(checkpoint)], capsys)


def test_an_unknown_checkpoint_is_refused_with_those_that_exist(checkpoint, capsys):
    said = refused([str(checkpoint.parent / "chk-7")], capsys)
    assert "checkpoint 7 is not in the checkpoint directory" in said
    assert "which has: 1" in said


def test_a_directory_that_is_not_there_is_refused(tmp_path, capsys):
    assert "this directory does not exist" in refused([str(tmp_path / "nowhere")], capsys)


def test_an_unknown_scheme_is_refused(capsys):
    assert "unknown scheme 'ftp'" in refused(["ftp://host/dir"], capsys)
