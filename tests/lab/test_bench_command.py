"""`python -m midstream_lab bench`: what it refuses, and how figures are shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from midstream.cli.main import main
from midstream_lab.__main__ import lab
from midstream_lab.bench.command import figures_table


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["windows"], "there is no benchmark 'windows'; there are: window, udf, lookup, keyed_process, strings"),
        (["window", "--slots", "yarn"], "--slots: 'yarn' is not one of spark, process"),
        (["window", "--events", "1001"], "1,001 events cannot be distributed evenly to 2 subtasks"),
        (["window", "--events", "1"], "--events: 1 is not between 1,000 and 100,000,000,000"),
        (["udf", "--keys", "10"], "--keys: the benchmark udf has no such option; window, keyed_process, sliding have"),
        (["nexmark", "--query", "q6"], "--query: there is no query 'q6'; there are: q0, q1"),
        (["nexmark", "--query", "q0", "--events", "1010"], "1,010 events are not a multiple of 100"),
        (["window", "--backlog", "10"], "--backlog: the benchmark window has no such option; recovery has"),
        (["large_state", "--state", "1"], "--state: 1 is not between 8 and 1,048,576"),
        (["recovery", "--backlog", "0"], "--backlog: 0 is not between 1 and 4,096"),
        (["recovery", "--events", "2000"], "--events: the benchmark recovery has no such option"),
        (["window", "--events", "many"], "--events: 'many' is not a whole number"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, says, capsys):
    assert main(["bench", *arguments], lab) == 2
    assert says in capsys.readouterr().err


def test_figures_are_shown_under_their_names():
    text = io.StringIO()
    screen = Console(file=text, width=100)
    screen.print(figures_table({"events_per_s": 3_200_000, "correct": True, "queries": {"q0": {"seconds": 4}}}))
    shown = text.getvalue()
    assert "3,200,000" in shown
    assert "queries q0 seconds" in shown
