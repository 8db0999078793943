"""What the peers' results must come to, against the events taken one by one."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "peers"))

import definitions
from definitions import expected, halves, label, require, require_rate

from midstream_lab.bench.nexmark.expected import EXPECTED

WINDOW_MS, SLIDE_MS, PER_MS, MANY_KEYS = 100, 20, 5, 1000


@pytest.fixture(autouse=True)
def short_windows(monkeypatch):
    monkeypatch.setattr(definitions, "WINDOW_MS", WINDOW_MS)
    monkeypatch.setattr(definitions, "SLIDE_MS", SLIDE_MS)
    monkeypatch.setattr(definitions, "EVENTS_PER_MS", PER_MS)
    monkeypatch.setattr(definitions, "MANY_KEYS", MANY_KEYS)


def one_by_one(workload: str, ranges, fired_ms: float) -> dict[str, float]:
    slide_ms = SLIDE_MS if workload == "sliding" else WINDOW_MS
    windows: dict[tuple[int, object], list[tuple[float, int]]] = {}
    for first, end in ranges:
        for i in range(first, end):
            ts, value = (i - first) // PER_MS, i % 1000 * 0.5
            key: object = ((i * 2654435761) & 0xFFFFFFFF) % (
                MANY_KEYS if workload in ("sliding", "window_keys") else 10_000
            )
            if workload == "udf":
                labelled = label({"ts": ts, "key": key, "value": value})
                key, value = labelled["name"], labelled["score"]
            for begin in range(ts // slide_ms * slide_ms, ts - WINDOW_MS, -slide_ms):
                windows.setdefault((begin, key), []).append((value, i % 65_536))
    fired = [rows for (begin, _), rows in windows.items() if begin + WINDOW_MS <= fired_ms]
    found = {"rows": len(fired), "n": sum(map(len, fired)), "total": sum(value for rows in fired for value, _ in rows)}
    payloads = sum(max(number for _, number in rows) for rows in fired)
    return found | ({"payloads": payloads} if workload == "strings" else {})


@pytest.mark.parametrize("workload", ["window", "window_keys", "udf", "strings", "sliding"])
@pytest.mark.parametrize(
    ("ranges", "fired_ms"),
    [(halves(3000), float("inf")), (halves(3000), 200), ([(0, 700), (66_000, 66_003)], float("inf"))],
)
def test_results_are_those_of_the_events(workload, ranges, fired_ms):
    assert expected(workload, ranges, fired_ms) == pytest.approx(one_by_one(workload, ranges, fired_ms), rel=1e-12)


def test_a_wrong_result_a_missing_one_and_a_missed_rate_are_errors():
    require({"n": 2.0}, {"n": 2, "more": 7})
    require({"n": 2.0}, {"n": 2.001}, relative=1e-3)
    with pytest.raises(ValueError, match=r"n must be .* and is nan"):
        require({"n": 2.0}, {"n": float("nan")})
    with pytest.raises(ValueError, match="nothing to check"):
        require({"n": 0.0}, {"n": 0.0})
    require_rate(400_000, 22.0)
    with pytest.raises(ValueError, match="only 17,391 of 20,000 rows/s"):
        require_rate(400_000, 23.0)


def flink_run():
    path = Path(definitions.__file__).parent / "flink" / "run.py"
    spec = importlib.util.spec_from_file_location("flink_run", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_flinks_results_are_checked_before_its_figures_are_given():
    checked = flink_run().checked
    about = {"variant": "", "seconds": 2.0, "events_per_s": 1500, "events": 3000}
    right = expected("window", halves(3000))
    found = checked(about | {"workload": "window", "result": list(right.values())})
    assert (found["events"], found["result_rows"], found["correct"]) == (3000, right["rows"], True)
    part = expected("window", [(0, 40), (1500, 1530)])
    found = checked(about | {"workload": "window", "result": list(part.values()), "read": [40.0, 30.0]})
    assert (found["events"], found["events_per_s"], found["bounded"]) == (70, 35.0, True)
    with pytest.raises(ValueError, match="rows must be"):
        checked(about | {"workload": "window", "result": [1, *list(right.values())[1:]]})
    total = sum(i % 1000 * 0.5 for i in range(3000))
    assert checked(about | {"workload": "keyed_process", "result": [7, total]})["result_rows"] == 7
    with pytest.raises(ValueError, match="total must be"):
        checked(about | {"workload": "keyed_process", "result": [7, total - 0.5]})
    with pytest.raises(ValueError, match="rows must be"):
        checked(about | {"workload": "q8", "result": [1, 1]})
    depends_on_the_clock, *rest = EXPECTED["q12"](3000)
    assert depends_on_the_clock is None
    assert checked(about | {"workload": "q12", "result": [7, *rest]})["result_rows"] == 7
    with pytest.raises(ValueError, match="bid_count must be"):
        checked(about | {"workload": "q12", "result": [7, 7, rest[1]]})
    assert checked({"workload": "recovery", "drained_s": 3.0}) == {
        "workload": "recovery", "drained_s": 3.0, "correct": True,
    }  # fmt: skip
