"""`midstream bench`: what it refuses, and how figures are shown."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from midstream.ui.benching import figures_table
from midstream.ui.cli import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["windows"], "there is no benchmark 'windows'; there are: window, exchange, latency"),
        (["window", "--slots", "yarn"], "--slots: 'yarn' is neither of spark, process"),
        (["window", "--events", "1001"], "--events: 1001 is not an even number"),
        (["window", "--backlog", "10"], "--backlog: the benchmark window has none; recovery has"),
        (["recovery", "--backlog", "0"], "--backlog: 0 is not between 1 and 4096 (MiB)"),
        (["recovery", "--events", "2000"], "--events: the benchmark recovery has a fixed number of runs"),
        (["window", "--events", "many"], "--events: 'many' is not a whole number"),
    ],
)
def test_what_cannot_be_measured_is_refused(arguments, says, capsys):
    assert main(["bench", *arguments]) == 2
    assert says in capsys.readouterr().err


def test_figures_are_shown_under_their_names():
    screen = Console(file=io.StringIO(), width=100)
    screen.print(figures_table({"events_per_s": 3_200_000, "correct": True, "checkpoints": {"completed": 4}}))
    shown = screen.file.getvalue()
    assert "3,200,000" in shown
    assert "checkpoints completed" in shown
