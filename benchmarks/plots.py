"""The plots beside RESULTS.md, from the files in benchmarks/results; written by compare.py and curves.py."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from plan import PLAN

OURS, THEIRS = "#c2410c", "#64748b"

Rows = list[dict[str, Any]]


def plot_all(directory: Path, measured: dict[str, Rows], curves: Rows) -> None:
    """One SVG per workload that was measured, and one per cost curve."""
    try:
        import matplotlib as mpl
    except ImportError:
        print("no plots: matplotlib is missing (make peers)")
        return
    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "midstream", "svg.fonttype": "none", "font.size": 9, "axes.grid": True}
    directory.mkdir(exist_ok=True)
    for name, rows in measured.items():
        if rows:
            _bars(directory / f"{name}.svg", name, rows)
    for curve in dict.fromkeys(row["curve"] for row in curves):
        _lines(directory / f"curve-{curve}.svg", [row for row in curves if row["curve"] == curve])


def _bars(path: Path, name: str, rows: Rows) -> None:
    """A bar per engine with its median, and a line from its lowest to its highest run."""
    from matplotlib import pyplot as plt

    figure = PLAN[name].figures[0]
    engines = [e for e in dict.fromkeys(row["engine"] for row in rows) if _of(rows, e, figure.name)]
    values = [_of(rows, engine, figure.name) for engine in engines]
    medians = [statistics.median(runs) for runs in values]
    spreads = [[m - min(v) for m, v in zip(medians, values, strict=True)],
               [max(v) - m for m, v in zip(medians, values, strict=True)]]  # fmt: skip
    picture, axes = plt.subplots(figsize=(7, 0.6 + 0.32 * len(engines)), layout="constrained")
    axes.barh(engines, medians, xerr=spreads, color=[OURS if e.startswith("midstream") else THEIRS for e in engines])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{name}: {figure.title} ({'more' if figure.more_is_better else 'less'} is better)")
    _save(picture, path)


def _lines(path: Path, rows: Rows) -> None:
    """The curve over its parameter, logarithmic; all runs as points, a line through the medians."""
    from matplotlib import pyplot as plt

    first = rows[0]
    at = sorted({row["x"] for row in rows})
    picture, axes = plt.subplots(figsize=(5, 3.2), layout="constrained")
    axes.plot([row["x"] for row in rows], [row["y"] for row in rows], "o", color=OURS, alpha=0.5, markersize=4)
    axes.plot(at, [statistics.median(row["y"] for row in rows if row["x"] == x) for x in at], color=OURS)
    axes.set_xscale("log")
    axes.set_xticks(at, [f"{x:,}" for x in at])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set_xlabel(first["x_title"])
    axes.set_ylabel(first["y_title"])
    _save(picture, path)


def _save(picture: Any, path: Path) -> None:
    from matplotlib import pyplot as plt

    picture.savefig(path, metadata={"Date": None})
    plt.close(picture)


def _of(rows: Rows, engine: str, figure: str) -> list[float]:
    return [row[figure] for row in rows if row["engine"] == engine and row.get(figure) is not None]


def curve_rows(path: Path) -> Rows:
    """The newest run of each curve."""
    if not path.exists():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    newest = {curve: max(row["run"] for row in rows if row["curve"] == curve) for curve in {r["curve"] for r in rows}}
    return [row for row in rows if row["run"] == newest[row["curve"]]]
