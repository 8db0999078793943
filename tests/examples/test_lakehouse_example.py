"""The lakehouse example as `make lakehouse-demo` runs it, on process slots."""

from __future__ import annotations

import runpy
from pathlib import Path

import psycopg
import pytest

from midstream.runtime.process.process_slots import ProcessSlots
from postgres_server import find_binaries, running_server

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.systems


def test_the_demo_kills_a_slot_and_finds_the_copy_equal(tmp_path, capsys):
    binaries = find_binaries()
    if binaries is None:
        pytest.skip("no PostgreSQL server here; Debian, Ubuntu: sudo apt install postgresql")
    demo = runpy.run_path(str(ROOT / "examples" / "lakehouse.py"))["run"]
    with running_server(binaries) as server:
        assert demo(server.dsn(), tmp_path, slots=ProcessSlots())
        with psycopg.connect(server.dsn()) as connection:
            for left in ("pg_replication_slots", "pg_publication", "pg_stat_user_tables WHERE relname LIKE 'demo_%'"):
                assert connection.execute(f"SELECT 1 FROM {left}").fetchall() == []
    assert "killed     a slot" in capsys.readouterr().out
