"""The commands of the laboratory, as they are typed."""

from __future__ import annotations

import json

import pytest

from midstream.cli.main import main
from midstream_lab.__main__ import lab


def test_programs_get_one_object_that_reports_that_nothing_was_lost(capsys):
    assert main(["simulate", "--topology", "keyed", "--seeds", "0:2", "--rows", "40", "--json"], lab) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["runs"], found["lost"], found["duplicated"], found["deadlocks"]) == (2, 0, 0, 0)
    assert found["format_version"] == 1


def test_one_seed_is_shown_event_by_event(capsys):
    assert main(["simulate", "--topology", "keyed", "--seed", "1", "--rows", "40", "--trace"], lab) == 0
    out = capsys.readouterr().out
    assert out.startswith("seed 1, topology keyed")
    assert "all as it should be" in out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["simulate", "--trace"], ["--trace shows a single run: give it as --seed N"]),
        (["simulate", "--seed", "0", "--seeds", "0:3"], ["--seeds: give either this or --seed"]),
        (["simulate", "--seed", "0", "--tail", "0", "--channel", "1::"], ["--channel, --tail: filters", "add --trace"]),
        (
            ["simulate", "--trace", "--seed", "1", "--jobs", "2", "--coverage"],
            ["--coverage, --jobs: --trace shows a single"],
        ),
        (["simulate", "--topology", "ring"], ["there is no 'ring'; there are"]),
        (["simulate", "--seeds", "9:3"], ["seeds: '9:3' is empty"]),
        (["mutations", "typo", "--seeds-max", "5"], ["there is no 'typo'"]),
        (["mutation"], ['Did you mean "mutations"?']),
        (["bench"], ["NAME requires an argument", "python -m midstream_lab bench --help"]),
    ],
)
def test_arguments_that_make_no_sense_are_refused_with_a_way_out(arguments, expected, capsys):
    assert main(arguments, lab) == 2
    out, err = capsys.readouterr()
    assert out == ""
    for part in expected:
        assert part in err.replace("\n", " ")
