"""What a job's page costs: `python -m midstream_lab bench window` and `latency` without it, and with it read and scraped every second.

    python benchmarks/page_cost.py --rounds 5

One reader asks for `status.json` and `metrics?subtasks=1` once a second, as an open page and Prometheus do. Both kinds of
run take turns; the ratios are of the medians.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import urllib.request
from typing import Any, Final

CLI: Final = "import sys; from midstream.cli.main import main; sys.exit(main())"
EVERY_S: Final = 1.0
TOKEN: Final = "a-token-of-the-benchmark"
FIGURES: Final = {"window": ("events_per_s",), "latency": ("p50_ms", "p90_ms", "p99_ms")}
WORKLOADS: Final = {"window": ("--events", "120000000"), "latency": ()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


class Reader(threading.Thread):
    """Asks for the status and the metrics of the job on that port, until it is told to stop."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._base = f"http://127.0.0.1:{port}/"
        self._over = threading.Event()
        self.answers = 0

    def run(self) -> None:
        while not self._over.wait(EVERY_S):
            for path in ("status.json", "metrics?subtasks=1"):
                request = urllib.request.Request(self._base + path, headers={"Authorization": f"Bearer {TOKEN}"})
                try:
                    with urllib.request.urlopen(request, timeout=5) as answer:
                        answer.read()
                except OSError:  # the job has not begun, or has ended
                    continue
                self.answers += 1

    def end(self) -> None:
        self._over.set()
        self.join()


def run(workload: str, page: bool) -> dict[str, Any]:
    port = free_port()
    reader = Reader(port)
    environment = {**os.environ, "MIDSTREAM_PAGE": str(port) if page else "off", "MIDSTREAM_PAGE_TOKEN": TOKEN}
    command = [sys.executable, "-c", CLI, "bench", workload, "--slots", "process", "--json"]
    if page:
        reader.start()
    done = subprocess.run([*command, *WORKLOADS[workload]], env=environment, capture_output=True, text=True, check=True)
    if page:
        reader.end()
        assert reader.answers >= 4, f"the page was read {reader.answers} times: the run is too short, or it has no page"
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def main() -> int:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--rounds", type=int, default=5)
    rounds: int = arguments.parse_args().rounds
    for workload, figures in FIGURES.items():
        runs: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for _ in range(rounds):
            for page in (False, True):
                runs[page].append(run(workload, page))
        for figure in figures:
            without, with_page = ([each[figure] for each in runs[page]] for page in (False, True))
            ratio = statistics.median(with_page) / statistics.median(without)
            print(f"{workload} {figure}: ratio {ratio:.3f}\n  without {without}\n  with    {with_page}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
