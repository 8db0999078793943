"""Files in local directories: mapped, without a name, gone with the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

import polars as pl
import pytest

from machine import limit_s
from midstream.engine.state.columns_on_disk import on_disk
from midstream.runtime.storage.local_disk import LocalDirectories, local_directories, probe_directories

KILLED = """
import os, signal, sys
from midstream.runtime.storage.local_disk import LocalDirectories
def write(file):
    file.write(b"half of it")
    file.flush()
    if sys.argv[2] == "while it writes":
        os.kill(os.getpid(), signal.SIGKILL)
mapped = LocalDirectories([sys.argv[1]]).map(write)
os.kill(os.getpid(), signal.SIGKILL)
"""


def anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))


def test_a_file_is_mapped_and_has_no_name(tmp_path: Path) -> None:
    disk = LocalDirectories([str(tmp_path)])
    mapped = disk.map(lambda file: (file.write(b"content"), None)[1])
    assert bytes(mapped) == b"content" and mapped.readonly
    assert list(tmp_path.iterdir()) == []


def test_directories_are_used_in_turn_and_made_if_they_are_gone(tmp_path: Path) -> None:
    used: list[str] = []

    def write(file: IO[bytes]) -> None:
        used.append(os.readlink(f"/proc/self/fd/{file.fileno()}").split("/midstream-state-")[0])
        file.write(b"x")

    directories = [str(tmp_path / "a"), str(tmp_path / "b" / "c")]
    disk = LocalDirectories(directories)
    for _ in range(4):
        disk.map(write)
    assert used == directories * 2 and disk.place == ", ".join(directories)


def test_a_file_that_cannot_be_written_is_gone_and_the_error_is_raised(tmp_path: Path) -> None:
    def write(file: IO[bytes]) -> None:
        file.write(b"x" * 100_000)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        LocalDirectories([str(tmp_path)]).map(write)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        LocalDirectories([str(tmp_path / "file" / "below")]).map(write)


@pytest.mark.parametrize("when", ["while it writes", "later"])
def test_a_killed_process_leaves_nothing_behind(tmp_path: Path, when: str) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path), when]
    assert subprocess.run(command, timeout=limit_s(60), check=False).returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_what_is_on_disk_takes_no_memory(tmp_path: Path) -> None:
    rows = 500_000
    frame = pl.DataFrame({"n": range(rows), "s": [f"a text of more than twelve bytes {n}" for n in range(rows)]})
    frame = frame.with_columns(d=pl.col("n").cast(pl.Decimal(20, 2)))
    size, before = frame.estimated_size(), anonymous_bytes()
    (there,) = on_disk((frame,), LocalDirectories([str(tmp_path)]))
    assert isinstance(there, pl.DataFrame) and there.equals(frame)
    assert anonymous_bytes() - before < size / 2


def test_spark_names_the_directories_and_otherwise_the_system_does() -> None:
    assert local_directories({"SPARK_LOCAL_DIRS": "/a/blockmgr-1, /b/blockmgr-2"}) == ["/a/blockmgr-1", "/b/blockmgr-2"]
    for nothing in ({}, {"SPARK_LOCAL_DIRS": " , "}):
        assert local_directories(nothing) == [tempfile.gettempdir()]


def test_a_directory_in_memory_is_reported_once_it_is_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(f"/dev/vda / ext4 rw 0 0\ntmpfs {tmp_path}/shm tmpfs rw 0 0\n", encoding="utf-8")
    (tmp_path / "shm").mkdir()
    disk = LocalDirectories([str(tmp_path), f"{tmp_path}/shm/x"], mounts)

    def write(file: IO[bytes]) -> None:
        file.write(b"x")

    disk.map(write)
    assert caplog.messages == []
    for _ in range(4):
        disk.map(write)
    (message,) = caplog.messages
    assert f"{tmp_path}/shm/x lies in memory (tmpfs)" in message and "spark.local.dir" in message


def test_directories_are_probed_and_left_as_they_were(tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text("/dev/vda / ext4 rw 0 0\n", encoding="utf-8")
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    directories = [tmp_path, tmp_path / "new", tmp_path / "file" / "below"]
    there, new, below = probe_directories({"SPARK_LOCAL_DIRS": ",".join(map(str, directories))}, mounts)
    for probe in (there, new):
        assert probe.kind == "ext4" and probe.free_bytes > 0 and probe.bytes_per_s > 0 and not probe.failure
    assert "Not a directory" in below.failure
    assert sorted(tmp_path.iterdir()) == before
