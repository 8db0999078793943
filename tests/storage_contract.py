"""What every Storage promises, whatever it is on."""

from __future__ import annotations

import pytest

from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage


def check_promises(storage: Storage) -> None:
    """In a storage where nothing is yet."""
    assert storage.list("") == [] and not storage.exists("chk/x") and storage.list("no-such") == []
    storage.write("chk/x", [b"one", memoryview(b"two"), b""])
    storage.write("chk/many", (b"%d " % n for n in range(3000)))
    assert storage.read("chk/x") == b"onetwo" and storage.exists("chk/x") and storage.exists("chk")
    assert storage.read("chk/many") == b"".join(b"%d " % n for n in range(3000))
    assert storage.read_range("chk/x", 2, 3) == b"etw" and storage.read_range("chk/x", 4, 100) == b"wo"
    assert storage.read_range("chk/x", 100, 5) == b""
    assert storage.create("chk/epoch", b"1") and not storage.create("chk/epoch", b"2")
    assert not storage.create("chk/epoch", b"1"), "the same content is not the same writer"
    assert storage.read("chk/epoch") == b"1" and not storage.create("chk/x", b"3")
    assert storage.create("chk/empty", b"", durable=False) and storage.read("chk/empty") == b""
    assert storage.list("") == ["chk"] and storage.list("chk") == ["empty", "epoch", "many", "x"]
    storage.sweep("chk", lambda name: True)
    storage.delete("chk/x")
    storage.delete("chk/x")
    assert storage.list("chk") == ["empty", "epoch", "many"]
    storage.delete("chk/epoch")
    assert storage.create("chk/epoch", b"3") and storage.read("chk/epoch") == b"3"
    storage.delete("chk")
    storage.delete("chk")
    assert storage.list("") == [] and not storage.exists("chk/many")
    with pytest.raises(StorageError, match=r"cannot read .*chk/x"):
        storage.read("chk/x")
    for path in ("../x", "/etc/passwd", "a/../../x", "a//b", "", "a/./b", "a\0b", "a\\b"):
        with pytest.raises(StorageError, match="is not a plain relative path"):
            storage.read(path)
        with pytest.raises(StorageError, match="is not a plain relative path"):
            storage.create(path, b"")
