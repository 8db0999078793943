"""Files on a local filesystem: whole or not there, confined, and with errors that say what to do."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.fs
import pytest

from machine import limit_s
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.runtime.storage.file_storage import TEMPORARY, FileStorage, RemoteStorage
from permissions import unprivileged
from storage_contract import check_promises


def everything_below(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_what_is_written_is_read_back_from_directories_made_on_the_way(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path / "not" / "yet"))
    assert storage.list("") == [] and not storage.exists("a/b/c")
    storage.write("a/b/c", [b"one", memoryview(b"two"), b""])
    storage.write("a/b/many", (b"%d " % n for n in range(3000)))
    assert storage.read("a/b/c") == b"onetwo"
    assert storage.read("a/b/many") == b"".join(b"%d " % n for n in range(3000))
    assert storage.list("a/b") == ["c", "many"] and storage.list("a") == ["b"] and storage.exists("a/b")
    storage.delete("a/b/c")
    storage.delete("a/b/c")
    assert storage.list("a/b") == ["many"]
    storage.delete("a")
    assert everything_below(tmp_path) == []


def test_a_storage_keeps_its_promises_on_a_path_and_where_files_are_renamed(tmp_path: Path) -> None:
    (tmp_path / "renamed").mkdir()
    check_promises(FileStorage(str(tmp_path / "path")))
    check_promises(RemoteStorage(f"file://{tmp_path}/renamed", "hdfs"))


def test_a_write_that_fails_midway_leaves_nothing_under_the_name_nor_beside_it(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))

    def pieces() -> object:
        yield b"half"
        raise KeyError("the other half")

    with pytest.raises(KeyError):
        storage.write("file", pieces())  # type: ignore[arg-type]
    assert everything_below(tmp_path) == []
    storage.write("file", [b"old"])
    with pytest.raises(KeyError):
        storage.write("file", pieces())  # type: ignore[arg-type]
    assert storage.read("file") == b"old" and everything_below(tmp_path) == ["file"]


def test_of_many_that_create_one_file_at_once_one_wins(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    start, won = threading.Barrier(8), []

    def create(who: int) -> None:
        start.wait(limit_s(10))
        if storage.create("epochs/1", b"%d" % who):
            won.append(who)

    threads = [threading.Thread(target=create, args=(who,)) for who in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(limit_s(10))
    assert len(won) == 1 and storage.read("epochs/1") == b"%d" % won[0]
    assert everything_below(tmp_path) == ["epochs/1"]


def test_files_that_were_never_finished_are_not_listed(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    (tmp_path / ".tmp-0123").write_bytes(b"torn")
    assert storage.list("") == []


def test_what_killed_writers_have_left_is_swept_by_the_name_it_would_have_got(tmp_path: Path) -> None:
    storage = FileStorage(str(tmp_path))
    storage.write("shared/whole", [b"x"])

    def killed() -> Iterator[bytes]:
        yield bytes(2**21)
        for file in (tmp_path / "shared").glob(".tmp-*"):  # as it is when the power goes
            shutil.copy(file, file.parent / file.name.replace("-mine", "-theirs"))
            shutil.copy(file, tmp_path / "copy")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        storage.write("shared/mine", killed())
    left = [file.name for file in (tmp_path / "shared").glob(".tmp-*")]
    assert len(left) == 1 and left[0].endswith("-theirs")
    assert (tmp_path / "copy").stat().st_size == 2**21, "it is written while it is made"
    storage.sweep("shared", lambda name: name in ("mine", "whole"))
    assert [file.name for file in (tmp_path / "shared").glob(".tmp-*")] == left
    storage.sweep("shared", lambda name: name == "theirs")
    assert everything_below(tmp_path / "shared") == ["whole"]
    (tmp_path / ".tmp-0123-chk-7").mkdir()
    (tmp_path / ".tmp-0123-chk-7" / "_owner").write_bytes(b"1")
    storage.sweep("", lambda name: name == "chk-7")
    storage.sweep("nothing there", lambda name: True)
    assert storage.list("") == ["copy", "shared"] and not (tmp_path / ".tmp-0123-chk-7").exists()


@pytest.mark.parametrize("path", ["../x", "/etc/passwd", "a/../../x", "a//b", "", "a/./b", "a\0b", "a\\b"])
def test_a_path_that_leads_out_is_refused(tmp_path: Path, path: str) -> None:
    storage = FileStorage(str(tmp_path / "root"))
    for call in (storage.read, storage.delete, storage.exists, lambda p: storage.write(p, [b""])):
        with pytest.raises(StorageError, match="is not a plain relative path"):
            call(path)
    assert everything_below(tmp_path) == []


def test_a_symbolic_link_that_leads_out_is_refused(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "root" / "link").symlink_to(tmp_path)
    with pytest.raises(StorageError, match="leads out of"):
        FileStorage(str(tmp_path / "root")).read("link/secret")


@pytest.mark.parametrize(
    ("number", "says"),
    [
        (errno.EACCES, "permission denied; the user that runs the job must be allowed to read and write there$"),
        (errno.EROFS, "the filesystem is mounted read-only$"),
        (errno.ENOSPC, r"the disk is full \([\d,]+\.\d of [\d,]+\.\d MiB are free\)$"),
    ],
)
def test_why_a_file_cannot_be_written_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, says: str
) -> None:
    storage = FileStorage(str(tmp_path))

    def refuse(*_args: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "writev", refuse)
    with pytest.raises(StorageError) as caught:
        storage.write("chk-1/state", [b"x"])
    assert re.match(f"cannot write {tmp_path}/chk-1/state: {says}", str(caught.value))
    monkeypatch.undo()
    assert everything_below(tmp_path) == []


def test_a_read_only_directory_is_named(open_path: Path) -> None:
    open_path.chmod(0o555)
    with unprivileged(), pytest.raises(StorageError, match="permission denied"):
        FileStorage(str(open_path)).write("x", [b""])


def test_a_file_where_a_directory_should_be_and_a_missing_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    storage = FileStorage(str(tmp_path))
    with pytest.raises(StorageError, match=r"cannot write .*/file/x: a part of the path is a file, not a directory"):
        storage.write("file/x", [b""])
    with pytest.raises(StorageError, match=r"cannot read .*/nothing: there is no such file or directory"):
        storage.read("nothing")


def test_urls(tmp_path: Path) -> None:
    FileStorage(f"file://{tmp_path}/with%20space").write("x", [b"1"])
    assert (tmp_path / "with space" / "x").read_bytes() == b"1"
    with pytest.raises(ConfigError, match=r"unknown scheme 'ftp'; use a path or one of file://, s3://"):
        FileStorage("ftp://host/path")
    with pytest.raises(ConfigError, match="an empty path"):
        FileStorage(" ")


@pytest.fixture(params=["s3", "hdfs"])
def remote(request: pytest.FixtureRequest, tmp_path: Path) -> RemoteStorage:
    """What is done for a scheme, on a filesystem of pyarrow's that is here."""
    (tmp_path / "chk").mkdir()
    return RemoteStorage(f"file://{tmp_path}", request.param)


def test_a_remote_storage_keeps_the_same_promises(remote: RemoteStorage, tmp_path: Path) -> None:
    assert remote.list("no-such") == [] and not remote.exists("chk/x")
    remote.write("chk/x", [b"one", memoryview(b"two")])
    assert remote.read("chk/x") == b"onetwo" and remote.exists("chk/x")
    assert remote.create("chk/epoch", b"1") and not remote.create("chk/epoch", b"2")
    assert remote.read("chk/epoch") == b"1"
    assert remote.list("") == ["chk"] and remote.list("chk") == ["epoch", "x"]
    remote.delete("chk/x")
    remote.delete("chk/x")
    remote.delete("chk")
    assert everything_below(tmp_path) == []
    with pytest.raises(StorageError, match="cannot read 'chk/x' in file://"):
        remote.read("chk/x")
    with pytest.raises(StorageError, match="is not a plain relative path"):
        remote.read("../x")


def test_parts_that_fail_midway_upload_nothing(remote: RemoteStorage, tmp_path: Path) -> None:
    def pieces() -> object:
        yield b"half"
        raise KeyError("the other half")

    with pytest.raises(KeyError):
        remote.write("chk/x", pieces())  # type: ignore[arg-type]
    assert everything_below(tmp_path) == []


class _Racing:
    """A writer gives its file its name between the listing and the deletion."""

    def __init__(self) -> None:
        self._files = pyarrow.fs.LocalFileSystem()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._files, name)

    def delete_file(self, path: str) -> None:
        os.rename(path, f"{path}-done")
        self._files.delete_file(path)


def test_what_is_gone_before_it_is_swept_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / f"{TEMPORARY}0011-state").write_bytes(b"x")
    storage = RemoteStorage(f"file://{tmp_path}", "hdfs")
    monkeypatch.setattr(storage, "_files", _Racing())
    storage.sweep("shared", lambda name: True)
    assert everything_below(tmp_path) == ["shared/.tmp-0011-state-done"]
