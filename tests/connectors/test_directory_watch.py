"""Which files of a directory are new: what is known, missing, back, still being written or written again."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from midstream.connectors.files.directory_watch import GONE_S, DirectoryWatch, Listing, Position, decoded_position
from midstream.engine.core.errors import ConfigError, StorageError

HOUR_NS = 3600 * 10**9
START_NS = 1000 * HOUR_NS


class Directory:
    """Looked at once a second, also by the next driver after `restart`."""

    def __init__(self, appear_whole: bool = False) -> None:
        self.files: dict[str, tuple[int, int]] = {}
        self.watch = DirectoryWatch(appear_whole)
        self.now_s = 0.0
        self.position: bytes | None = None

    def put(self, name: str, size: int = 1, age_s: float = 10) -> None:
        self.files[name] = (size, int(START_NS + (self.now_s - age_s) * 1e9))

    def look(self, after_s: float = 1) -> list[str]:
        self.now_s += after_s
        infos = [SimpleNamespace(path=p, size=s, mtime_ns=m) for p, (s, m) in self.files.items()]
        known = decoded_position(self.position, "test")
        now_ns = int(START_NS + self.now_s * 1e9)
        new, after = self.watch.poll(Listing.of(infos), known, now_ns=now_ns, now_s=self.now_s)
        self.position = after.encoded()
        return [info.path for info in new]

    def restart(self) -> None:
        self.watch = DirectoryWatch(False)


def test_a_file_is_taken_once_nobody_writes_to_it_any_more():
    there = Directory()
    for size in range(1, 20):
        there.put("a", size, age_s=0)
        assert there.look() == []
    assert there.look() == ["a"]
    assert there.look() == []


def test_a_file_from_the_future_is_taken_once_it_is_the_same_for_a_while():
    there = Directory()
    there.put("a", age_s=-500)
    assert there.look() == []
    assert there.look() == []
    assert there.look() == ["a"]


def test_an_object_is_whole_when_it_is_there():
    there = Directory(appear_whole=True)
    there.put("a", age_s=0)
    assert there.look() == ["a"]


def test_a_file_that_is_missing_from_a_listing_is_not_new_when_it_is_back():
    there = Directory()
    for name in "abc":
        there.put(name)
    assert sorted(there.look()) == ["a", "b", "c"]
    missing = there.files.pop("b")
    before = there.position
    assert there.look() == []
    assert there.position != before
    there.files["b"] = missing
    assert there.look() == []
    assert there.position == before
    there.restart()
    assert there.look() == []


def test_a_file_that_is_gone_for_long_is_forgotten_but_not_while_all_are():
    there = Directory()
    for name in "abc":
        there.put(name)
    there.look()
    gone, there.files = there.files, {}
    for _ in range(5):
        assert there.look(GONE_S) == []
    there.files = dict(gone)
    assert there.look() == []
    del there.files["a"]
    there.look()
    there.look(GONE_S)
    assert len(decoded_position(there.position, "test").seen) == 2
    there.put("a")
    assert there.look() == ["a"]


@pytest.mark.parametrize("restart", [False, True])
def test_a_file_that_is_written_again_is_refused(restart):
    there = Directory()
    there.put("a")
    there.put("b", age_s=20)
    there.look()
    if restart:
        there.restart()
    there.put("b", 1, age_s=0)
    with pytest.raises(StorageError, match="b: was changed after it was taken"):
        there.look()
    del there.files["b"]
    assert there.look() == []


@pytest.mark.parametrize("restart", [False, True])
@pytest.mark.parametrize("was_gone", [False, True])
@pytest.mark.parametrize(("size", "age_s"), [(1, 5000), (2, 10), (0, 10), (2**40, 10), (1, 12)])
def test_an_older_file_in_the_place_of_one_that_was_taken_is_refused(was_gone, restart, size, age_s):
    there = Directory()
    there.put("a")
    there.put("z", age_s=5)
    taken_ns = there.files["a"][1]
    there.look()
    if was_gone:
        del there.files["a"]
        there.look()
    if restart:
        there.restart()
    there.files["a"] = (size, taken_ns - int((age_s - 10) * 1e9))
    with pytest.raises(StorageError, match="a: was changed after it was taken"):
        there.look()


def test_a_copy_of_the_directory_that_keeps_whole_seconds_has_the_same_files():
    there = Directory()
    for n in range(200):
        there.put(f"{n}", size=n, age_s=10 + n / 7)
    assert len(there.look()) == 200
    there.restart()
    there.files = {name: (size, ns // 10**9 * 10**9) for name, (size, ns) in there.files.items()}
    assert there.look() == []


def test_a_position_of_another_source_or_without_its_states_is_refused():
    there = Directory()
    there.put("a")
    there.look()
    stored = msgspec.msgpack.decode(there.position or b"")
    for other in (1, stored[:5]):
        with pytest.raises(ConfigError, match="was written by another kind of source"):
            decoded_position(msgspec.msgpack.encode(other), "test")
    with pytest.raises(StorageError, match="test: the position in the checkpoint is damaged"):
        decoded_position(msgspec.msgpack.encode([*stored[:5], b""]), "test")


def test_a_position_of_many_files_has_eight_bytes_for_each():
    random = np.random.default_rng(1)
    hashes = np.sort(random.integers(0, 2**64, 100_000, dtype=np.uint64))
    states = random.integers(1, 2**16, 100_000, dtype=np.uint16)
    encoded = Position(100_000, 5, hashes, states=states).encoded()
    assert len(encoded) < 840_000
    after = decoded_position(encoded, "test")
    assert np.array_equal(after.seen, hashes) and np.array_equal(after.states, states)
