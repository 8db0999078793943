"""What TLS costs: `python -m midstream_lab bench exchange`, `latency` and `window`, with connections encrypted and not, in turns.

    python benchmarks/tls_cost.py --rounds 3

The ratios are of the medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from typing import Any, Final

CLI: Final = """
import inspect, sys
from midstream import Environment
inspect.unwrap(Environment.__init__).__kwdefaults__["tls"] = sys.argv.pop(1)
from midstream.cli.main import main
sys.exit(main())
"""
FIGURES: Final = {"exchange": ("events_per_s",), "latency": ("p50_ms", "p99_ms"), "window": ("events_per_s",)}
WORKLOADS: Final = {"exchange": (), "latency": (), "window": ("--parallelism", "2")}


def run(workload: str, tls: str) -> dict[str, Any]:
    command = [sys.executable, "-c", CLI, tls, "bench", workload, "--slots", "process", "--json", *WORKLOADS[workload]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--rounds", type=int, default=3)
    rounds: int = arguments.parse_args().rounds
    for workload, figures in FIGURES.items():
        runs: dict[str, list[dict[str, Any]]] = {"off": [], "on": []}
        for number in range(rounds):
            for tls in ("off", "on") if number % 2 == 0 else ("on", "off"):
                runs[tls].append(run(workload, tls))
        for figure in figures:
            plain, encrypted = (statistics.median(one[figure] for one in runs[tls]) for tls in ("off", "on"))
            print(
                f"{workload} {figure}: {plain:,} plain, {encrypted:,} with TLS, {encrypted / plain:.3f} x", flush=True
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
