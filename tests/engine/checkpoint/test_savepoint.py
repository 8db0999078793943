"""A savepoint holds all that it needs and nothing else, is whole or does not count, and can be copied back from anywhere."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import xxhash

from checkpoint_samples import metadata_of, pipeline
from in_memory import MemoryStorage
from midstream.engine.checkpoint.channel_state import segment_bytes
from midstream.engine.checkpoint.extents import files_of
from midstream.engine.checkpoint.metadata import CheckpointMetadata, Committables
from midstream.engine.checkpoint.savepoint import (
    SavepointFile,
    SavepointLocation,
    claim_location,
    copy_in,
    discard,
    write_savepoint,
)
from midstream.engine.checkpoint.state_files import StateFile, state_file, verify_chunks
from midstream.engine.checkpoint.store import (
    SAVEPOINT,
    StartState,
    begin,
    load,
    next_checkpoint_id,
    publish,
    record_start,
    take_over,
)
from midstream.engine.core.errors import StorageError
from midstream.engine.protocol.messages import ChannelState, ChunkHandle, OperatorSnapshot, PartHandle, Segment
from midstream.runtime.storage.file_storage import FileStorage
from permissions import unprivileged

ABOUT = SavepointFile("job", "id")
OLD, NEW = state_file(1, 0, 4, 1, 0), state_file(1, 0, 7, 1, 1)
CHANNELS = StateFile(1, 0, 7, 1, 1, "channels").path
BYTES = {OLD: b"gone--kept", NEW: b"first-second", CHANNELS: b"rows"}


def chunk(chunk_id: str, file: str, piece: bytes) -> ChunkHandle:
    offset = BYTES[file].index(piece)
    return ChunkHandle(chunk_id, file, offset, len(piece), xxhash.xxh3_64_intdigest(piece), 1, 0, 15)


def checkpoint(storage: MemoryStorage) -> CheckpointMetadata:
    """Number 7: chunks of two files, one of them shared with an older checkpoint, one inline, a deletion vector, and rows
    in flight.
    """
    storage.files.update(BYTES)
    inline = ChunkHandle("small", "", 0, 2, xxhash.xxh3_64_intdigest(b"in"), 1, 0, 15, inline=b"in")
    parts = (
        (chunk("kept", OLD, b"kept"), inline),
        (msgspec.structs.replace(chunk("second", NEW, b"second"), removed=(chunk("first", NEW, b"first-"),)),),
    )
    snapshots = tuple(OperatorSnapshot("count", (PartHandle("s", "keyed", chunks),)) for chunks in parts)
    flying = Segment(CHANNELS, 0, 4, xxhash.xxh3_64_intdigest(b"rows"), 1, 1)
    channels = (ChannelState(0, 0, 1, False, (flying,)),)
    plain = metadata_of(pipeline(), {"count": snapshots}, checkpoint_id=7)
    return msgspec.structs.replace(
        plain,
        channels=channels,
        files=tuple(sorted(files_of(snapshots, channels))),
        committables=(Committables(7, "count", "Count", (b"pending file",)),),
    )


def parts_of(metadata: CheckpointMetadata) -> list[PartHandle]:
    return [part for op in metadata.operators for snapshot in op.subtasks for part in snapshot.parts]


def is_whole(storage: MemoryStorage, metadata: CheckpointMetadata) -> bool:
    assert verify_chunks(storage, parts_of(metadata), "here") == len("kept" + "in" + "first-second")
    assert bytes(segment_bytes(storage, metadata.channels[0].segments[0], "here")) == b"rows"
    return all(metadata.files) and set(metadata.files) <= storage.files.keys()


def test_it_holds_what_it_needs_and_nothing_else_and_refers_to_nothing_outside() -> None:
    source, target = MemoryStorage(), MemoryStorage()
    place = claim_location(lambda url: target, "/saved", "/job", ABOUT)
    write_savepoint(source, checkpoint(source), place)
    saved = load(target, "job", "latest")
    assert saved.checkpoint_id == 7 and saved.committables == ()
    assert target.files[OLD] == b"kept"
    assert set(target.files) == {SAVEPOINT, "chk-7/_metadata", OLD, NEW, CHANNELS}
    assert is_whole(target, saved)
    with pytest.raises(StorageError, match="of the job 'job', not of 'other'"):
        load(target, "other", "latest")


def test_damage_is_not_copied() -> None:
    source, target = MemoryStorage(), MemoryStorage()
    metadata = checkpoint(source)
    for damaged in (b"first-secone", b"first-"):
        source.files[NEW] = damaged
        place = claim_location(lambda url: target, "/saved", "/job", ABOUT)
        with pytest.raises(StorageError, match=f"{NEW}.*cannot be copied"):
            write_savepoint(source, metadata, place)
        with pytest.raises(StorageError, match="begun here and never completed"):
            load(target, "job", "latest")
        discard(place)
        assert target.files == {}


def test_one_whose_metadata_was_not_written_was_never_completed() -> None:
    source, target = MemoryStorage(), MemoryStorage()
    target.refuse = lambda path: path.endswith("_metadata")
    with pytest.raises(StorageError, match="disk is full"):
        write_savepoint(source, checkpoint(source), claim_location(lambda url: target, "/saved", "/job", ABOUT))
    with pytest.raises(StorageError, match="begun here and never completed"):
        load(target, None, "latest")


@pytest.mark.parametrize("place", ["/job", "/job/", "/job/chk-900", "/job/shared/x"])
def test_a_place_where_the_job_cleans_up_is_refused(place: str) -> None:
    target = MemoryStorage()
    with pytest.raises(StorageError, match=r"in the job's checkpoint directory.* or below /job/savepoints"):
        claim_location(lambda url: target, place, "/job", ABOUT)
    assert not target.files
    claim_location(lambda url: target, "/job/savepoints/before-the-upgrade", "/job", ABOUT)


def test_a_place_behind_a_url_with_parameters() -> None:
    root = "s3://bucket/job?region=r&scheme=http"
    for inside in ("s3://bucket/job/chk-900", "s3://bucket/job/shared?region=r", root):
        with pytest.raises(StorageError, match="in the job's checkpoint directory"):
            claim_location(lambda url: MemoryStorage(), inside, root, ABOUT)
    asked: list[str] = []
    place = claim_location(lambda url: asked.append(url) or MemoryStorage(), None, root, ABOUT)
    assert place.url == "s3://bucket/job/savepoints/1?region=r&scheme=http"
    assert asked == ["s3://bucket/job/savepoints?region=r&scheme=http", place.url]


def test_a_place_that_is_taken_is_refused_and_left_alone() -> None:
    for there in ("notes.txt", "chk-7/_metadata", SAVEPOINT):
        storage = MemoryStorage()
        storage.files[there] = b"mine"
        with pytest.raises(StorageError, match=f"/saved: the place is taken .*{there.split('/')[0]}"):
            claim_location(lambda url, storage=storage: storage, "/saved", "/job", ABOUT)  # type: ignore[misc]  # mypy infers no lambda with defaults
        assert storage.files == {there: b"mine"}


def test_giving_a_place_back_touches_nothing_that_was_put_there_meanwhile() -> None:
    source, target = MemoryStorage(), MemoryStorage()
    place = claim_location(lambda url: target, "/saved", "/job", ABOUT)
    write_savepoint(source, checkpoint(source), place)
    target.files["notes.txt"] = b"mine"
    discard(place)
    assert target.files == {"notes.txt": b"mine"}


def test_without_a_place_they_are_numbered_below_the_checkpoint_directory(tmp_path: Path) -> None:
    root = str(tmp_path)
    first = claim_location(FileStorage, None, root, ABOUT)
    second = claim_location(FileStorage, None, root, ABOUT)
    assert (first.url, second.url) == (f"{root}/savepoints/1", f"{root}/savepoints/2")
    discard(first)
    assert claim_location(FileStorage, None, root, ABOUT).url == f"{root}/savepoints/3"


def test_a_place_that_may_not_be_written_says_so(open_path: Path) -> None:
    (open_path / "file").touch()
    with pytest.raises(StorageError, match="a part of the path is a file"):
        claim_location(FileStorage, str(open_path / "file" / "here"), "/job", ABOUT)
    open_path.chmod(0o555)
    with unprivileged(), pytest.raises(StorageError, match=r"here.*permission denied"):
        claim_location(FileStorage, str(open_path / "here"), "/job", ABOUT)


def opened_by(own: MemoryStorage, job_id: str) -> StartState:
    taken = take_over(own, "/job", "job", job_id)
    return begin(own, record_start(own, taken, first=next_checkpoint_id(own, 0), fresh=False), None, 0, ())


def test_a_checkpoint_elsewhere_becomes_one_of_the_jobs_own() -> None:
    source, own = MemoryStorage(), MemoryStorage()
    saved = checkpoint(source)
    opened = opened_by(own, "id2")
    copied = copy_in(source, saved, own, opened.epoch, opened.next_checkpoint_id)
    publish(own, copied)
    source.files.clear()
    found = load(own, "job", "latest")
    assert (found.checkpoint_id, found.epoch) == (7, opened.epoch)
    assert found.committables == saved.committables
    assert is_whole(own, found)
    assert all(file.epoch == opened.epoch for path in found.files if (file := StateFile.parse(path)))
    assert len(found.files) == 3


def test_it_takes_a_number_above_those_that_are_there() -> None:
    source, own = MemoryStorage(), MemoryStorage()
    opened = opened_by(own, "id2")
    assert copy_in(source, checkpoint(source), own, opened.epoch, 12).checkpoint_id == 12


def test_a_copy_that_was_cut_off_is_cleaned_up_by_the_next_start() -> None:
    source, own = MemoryStorage(), MemoryStorage()
    opened = opened_by(own, "id2")
    copy_in(source, checkpoint(source), own, opened.epoch, opened.next_checkpoint_id)
    again = opened_by(own, "id3")
    assert own.list("shared") == []
    assert again.retained == ()


def test_a_savepoint_can_be_moved(tmp_path: Path) -> None:
    source = MemoryStorage()
    metadata = checkpoint(source)
    place = SavepointLocation(str(tmp_path / "here"), FileStorage(str(tmp_path / "here")))
    write_savepoint(source, metadata, place)
    (tmp_path / "here").rename(tmp_path / "there")
    moved = FileStorage(str(tmp_path / "there"))
    saved = load(moved, "job", "latest")
    assert verify_chunks(moved, parts_of(saved), "there") > 0
