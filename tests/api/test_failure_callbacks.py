"""What a job reports to the program that runs it: failures as they happen, with the row, and what functions print and log."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from machine import limit_s
from midstream import Environment, fixed_restarts
from midstream.engine.core.errors import ClusterError
from midstream.engine.protocol.messages import GetLogs
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until


def test_a_failure_shows_the_row_and_where_it_is_and_a_crash_shows_the_last_output(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "app")
    data, first, seen = tmp_path / "rows.parquet", tmp_path / "first", tmp_path / "seen"
    pq.write_table(pa.table({"n": range(1000)}), data)

    def crash(row: dict[str, Any]) -> dict[str, Any]:
        if row["n"] == 700 and not first.exists():
            first.touch()
            return {"n": 1 // (row["n"] - 700)}
        if row["n"] == 700:
            logging.getLogger("app").info("at %d", row["n"])
            print("the last thing")
            until("somebody has read the logs", seen.exists, 30)
            os._exit(7)
        return row

    env = Environment("told", restart=fixed_restarts(1, "0 s"))
    env.read_files(data).filter(lambda row: True).map(crash).print(limit=0)
    job = env.start(slots=ProcessSlots())

    def entries() -> Any:
        return job._driver.request(GetLogs()).result().logs

    until("the line that was printed", lambda: any(entry.line.text == "the last thing" for entry in entries()), 60)
    (printed,) = [entry.line for entry in entries() if entry.line.logger == "stdout"]
    assert (printed.operator, printed.subtask) == ("map", 0)
    seen.touch()
    with pytest.raises(ClusterError) as ended:
        job.wait(limit_s(60))
    assert "ended with status 7" in str(ended.value)
    assert str(ended.value).endswith("Its last lines:\nat 700\nthe last thing")

    (logged,) = [record for record in caplog.records if record.name == "app"]
    assert (logged.levelno, logged.getMessage()) == (logging.INFO, "at 700")
    (told,) = [record.getMessage() for record in caplog.records if record.name == "midstream"]
    summary, *trace = told.splitlines()
    assert "operator 'map': the function raised ZeroDivisionError for the row {'n': 700}" in summary
    assert summary.endswith(f"({data}, row 700, counted from 0)")
    assert "in crash" in "\n".join(trace) and "stateless.py" not in told
    assert trace[-1] == "Restart 1 in 0 s, from the beginning."
