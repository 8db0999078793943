"""What counts as another output, and what does not."""

from __future__ import annotations

import math
from typing import Any

import pyarrow as pa
import pytest

from midstream.testing.simulation.campaign import Report
from midstream.testing.simulation.job_scenario import Cuts, JobScenario
from midstream.testing.simulation.output_compare import Contract, Difference, differences
from midstream.testing.simulation.simulated_job import SourceLine
from midstream.testing.simulation.surroundings import Effect
from midstream.testing.simulation.verdict import Verdict

ANY_ORDER = Contract()
SINK = SourceLine("out", "print", "print", "job.py:7")


def compared(before: list[dict[str, Any]], after: list[dict[str, Any]], contract: Contract = ANY_ORDER) -> list[str]:
    found = differences(
        {"out": pa.Table.from_pylist(before)}, {"out": pa.Table.from_pylist(after)}, [SINK], {"out": contract}
    )
    return [line for difference in found for line in difference.lines()]


def test_the_order_of_rows_does_not_matter() -> None:
    assert compared([{"a": 1}, {"a": 2}, {"a": 2}], [{"a": 2}, {"a": 1}, {"a": 2}]) == []


def test_missing_doubled_changed_and_surplus_rows_are_distinguished() -> None:
    before = [{"k": i, "n": 10 + i, "s": "x"} for i in range(4)]
    after = [before[0], before[0], {"k": 1, "n": 99, "s": "x"}, before[2], {"k": 70, "n": 70, "s": "y"}]
    lines = compared(before, after)
    assert lines[0] == (
        "print 'out' (job.py:7): 1 row is missing, 1 row is there too often, 1 row has changed, 1 row should not be there"
    )
    assert "  missing:   k=3, n=13, s='x'" in lines
    assert "  too often: k=0, n=10, s='x'" in lines
    assert lines[lines.index("  expected:  k=1, n=11, s='x'") + 1] == "  instead:   k=1, n=99, s='x'"
    assert "  surplus:   k=70, n=70, s='y'" in lines


def test_no_output_at_all_is_a_difference() -> None:
    assert isinstance(differences({"out": pa.table({"a": [1]})}, {}, [SINK], {})[0], Difference)
    assert differences({}, {}, [SINK], {}) == []
    assert differences({}, {"out": pa.table({"a": [1]})}, [SINK], {})[0].surplus == [{"a": 1}]


def test_the_last_digits_of_a_sum_may_differ_and_nothing_more() -> None:
    assert compared([{"a": 0.1 + 0.2}, {"a": 5.0}], [{"a": 0.3}, {"a": 5.0}]) == []
    assert compared([{"a": [{"b": 0.1 + 0.2}]}], [{"a": [{"b": 0.3}]}]) == []
    assert compared([{"a": 1.0}], [{"a": 1.0001}]) != []
    assert compared([{"a": sum(0.1 for _ in range(2000))}], [{"a": 200.0}]) == []
    assert compared([{"a": 1.0}], [{"a": 1.0 + 1e-11}]) != []
    assert compared([{"a": math.nan}, {"a": math.inf}], [{"a": math.inf}, {"a": math.nan}]) == []


def test_small_amounts_differ_as_large_ones_do() -> None:
    assert compared([{"a": 1e-10}], [{"a": 3e-10}]) != []
    assert compared([{"a": 0.0}], [{"a": 1e-300}]) != []
    assert compared([{"a": 1e-10 * (0.1 + 0.2)}], [{"a": 1e-10 * 0.3}]) == []


def test_what_is_left_where_floats_cancel_out_differs_and_is_explained() -> None:
    lines = compared([{"k": 1, "a": 0.0}], [{"k": 1, "a": 0.1 + 0.2 - 0.3}])
    assert lines[-1].startswith("  If positive and negative floats cancel out")
    assert not any("cancel out" in line for line in compared([{"k": 1, "a": 2.0}], [{"k": 1, "a": 1e-17}]))


def test_short_floats_have_fewer_digits() -> None:
    def table(value: float) -> dict[str, pa.Table]:
        return {"out": pa.table({"a": pa.array([value], pa.float32())})}

    assert differences(table(0.3), table(0.3000002), [SINK], {}) == []
    assert differences(table(0.3), table(0.301), [SINK], {}) != []


@pytest.mark.parametrize(
    "value", [[1, 2], {"x": [1]}, b"\x00", None, True, "text", [{"k": None}]], ids=lambda value: type(value).__name__
)
def test_values_of_all_types_are_compared(value: Any) -> None:
    assert compared([{"a": value, "n": 1}], [{"a": value, "n": 1}]) == []
    assert compared([{"a": value, "n": 1}], [{"a": value, "n": 2}]) != []


def test_of_updates_only_the_last_of_each_key_counts() -> None:
    contract = Contract(latest=("k",))
    before = [{"k": 1, "n": 1}, {"k": 1, "n": 3}, {"k": 2, "n": 5}]
    assert compared(before, [{"k": 2, "n": 5}, {"k": 1, "n": 2}, {"k": 1, "n": 3}], contract) == []
    assert compared(before, [{"k": 2, "n": 5}, {"k": 1, "n": 3}, {"k": 1, "n": 2}], contract) != []


def test_ignored_columns_may_differ() -> None:
    contract = Contract(ignored=("at",))
    assert compared([{"k": 1, "at": 5}], [{"k": 1, "at": 6}], contract) == []
    assert compared([{"k": 1, "at": 5}], [{"k": 2, "at": 5}], contract) != []


def test_numbers_and_their_nouns_agree() -> None:
    report = Report("job", seeds=1, long=1, rows=1, seconds=0.01)
    assert "1 run over 1 row, 10 ms each" in report.text
    assert "1 of the runs had not reached its end" in report.text
    report = Report("job", seeds=2, rows=2, kind="differs", seed=1, rows_needed={"one": 1, "two": 2})
    assert "(found after 2 runs over 2 rows)" in report.text.replace(", 0 ms each", "")
    assert "Rows: the first row of 'one', the first 2 rows of 'two'" in report.text
    assert JobScenario(cuts=Cuts(1)).describe() == "batches of 1 row"
    effect = Effect("writes to a.txt", "job.py:3")
    assert Verdict("effect", effects=[(effect, 0, 1)]).lines() == [
        "job.py:3: a function writes to a.txt: 1 time instead of 0"
    ]
