"""What a slot tells of an exception: it can be sent, whatever user code has put into it."""

from __future__ import annotations

import msgspec

from midstream.engine.core.ids import TaskId
from midstream.engine.protocol.messages import TaskFailed
from midstream.engine.worker.failure_reports import deploy_failed, task_failed


def test_half_a_surrogate_pair_is_written_out() -> None:
    """As in the message of an OSError about a file whose name is no UTF-8."""
    try:
        raise FileNotFoundError(2, "No such file or directory", "caf\udce9.csv\udcff")
    except FileNotFoundError as error:
        failed = task_failed(0, TaskId(0, 0), "read", error, False, position="caf\udce9.csv, row 3")
        msgspec.msgpack.encode(deploy_failed(0, error))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(failed), type=TaskFailed) == failed
    assert "caf\\udce9.csv" in failed.summary
