"""`midstream simulate` from the command line."""

from __future__ import annotations

import json

from midstream.cli.main import main


def test_machines_get_one_object_that_says_that_nothing_was_lost(capsys):
    assert main(["simulate", "--topology", "keyed", "--seeds", "0:2", "--rows", "40", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["lost"], found["duplicated"], found["deadlocks"]) == (2, 0, 0, 0)


def test_one_seed_is_shown_event_by_event(capsys):
    assert main(["simulate", "--topology", "keyed", "--seed", "1", "--rows", "40", "--trace"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 1, topology keyed")
    assert "all as it should be" in out
