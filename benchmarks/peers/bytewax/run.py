"""One run of one workload on Bytewax; the last line on stdout is the result as JSON.

usage: .peers/bytewax/bin/python benchmarks/peers/bytewax/run.py WORKLOAD [--variant V] [--events N] [--max-seconds S]

Two processes with one worker each, a recovery store, and a snapshot every second. Seconds count from the first call
of a source to the end of the later process's dataflow, its last snapshot included. The input ends after
`--max-seconds` (30), and what was read until then is checked and reported.
"""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path

# This directory is called bytewax, and must not be taken for the package: its parent comes last.
sys.path[:] = [
    str(Path(__file__).resolve().parent),
    *(path for path in sys.path if Path(path).resolve() != Path(__file__).resolve().parent),
    str(Path(__file__).resolve().parents[1]),
]

import flows
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main
from definitions import (
    LATENCY_RATE_PER_S,
    LATENCY_S,
    arguments,
    expected,
    halves,
    percentiles_ms,
    print_result,
    require,
    require_rate,
)

EVENTS = {
    "window": 20_000_000,
    "udf": 4_000_000,
    "strings": 10_000_000,
    "latency": LATENCY_RATE_PER_S * LATENCY_S,
}
VARIANTS = {
    "window": ("columns", "stateful"),
    "udf": ("stateful",),
    "strings": ("columns",),
    "latency": ("rows",),
}
PROCESSES = 2
SNAPSHOTS = timedelta(seconds=1)
MAX_SECONDS = 30.0
POLL_S = 0.02
DRAIN_S_MAX = 120.0
"""How long a run may take beyond its input."""


def main() -> None:
    if sys.argv[1:2] == ["worker"]:
        _work(json.loads(sys.argv[2]))
        return
    args = arguments(__doc__, [*EVENTS])
    if args.parallelism != PROCESSES:
        sys.exit(f"error: this runs in {PROCESSES} processes, not {args.parallelism}")
    variant = args.variant or VARIANTS[args.workload][0]
    if variant not in VARIANTS[args.workload]:
        sys.exit(f"error: {args.workload} has the variants {', '.join(VARIANTS[args.workload])}, not {variant}")
    events = args.events or EVENTS[args.workload]
    done = _run(args.workload, variant, events, args.max_seconds or MAX_SECONDS)
    read = {part: count for found in done for part, count in found["read"].items()}
    seconds = max(found["ended_s"] for found in done) - min(found["began_s"] for found in done if found["began_s"])
    names = {"rows": "results", "n": "counted", "total": "total", "payloads": "payloads"}
    result = {what: sum(found[name] for found in done) for what, name in names.items()}
    figures = {}
    if args.workload == "latency":
        half = events // 2
        require({"n": events, "total": 2 * (half * (half - 1) // 2)}, result)
        require_rate(events, seconds)
        figures = percentiles_ms([ms for found in done for ms in found["latencies_ms"]])
    else:
        ranges = [(halves(events)[int(part)][0], halves(events)[int(part)][0] + count) for part, count in read.items()]
        require(expected(args.workload, ranges), result, relative=1e-6 if args.workload == "udf" else 0.0)
    print_result(
        engine="bytewax",
        version=version("bytewax"),
        workload=args.workload,
        variant=variant,
        events=sum(read.values()),
        parallelism=PROCESSES,
        seconds=seconds,
        **figures,
        result_rows=result["rows"],
        sources_per_process=[len(found["read"]) for found in done],
        rows_to_each_process=[found["counted"] for found in done],
        memory_mb=round(sum(found["peak_bytes"] for found in done) / 1e6, 1),
        **({"bounded": True} if sum(read.values()) < events else {}),
    )


def _run(workload: str, variant: str, events: int, max_seconds: float) -> list[dict]:
    with tempfile.TemporaryDirectory(prefix="peer-bytewax-") as directory:
        init_db_dir(Path(directory), PROCESSES)
        addresses = _free_addresses()
        results = [Path(directory, f"result-{number}") for number in range(PROCESSES)]
        processes = []
        try:
            for number in range(PROCESSES):
                task = {
                    "number": number,
                    "addresses": addresses,
                    "directory": directory,
                    "result": str(results[number]),
                    "flow": [workload, variant, events, max_seconds],
                }
                command = [sys.executable, __file__, "worker", json.dumps(task)]
                processes.append(subprocess.Popen(command, stdout=sys.stderr))
            deadline_s = time.monotonic() + max(max_seconds, LATENCY_S) + DRAIN_S_MAX
            while any(process.poll() is None for process in processes):
                if any(process.poll() for process in processes):
                    break  # the other would wait for it
                if time.monotonic() > deadline_s:
                    raise RuntimeError(f"Bytewax had not ended {DRAIN_S_MAX:g} s after its input")
                time.sleep(POLL_S)
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        if any(process.returncode for process in processes):
            raise RuntimeError("a Bytewax process has failed; its error is above")
        return [json.loads(result.read_text()) for result in results]


def _work(task: dict) -> None:
    flow = flows.dataflow(*task["flow"])
    recovery = RecoveryConfig(task["directory"])
    cluster_main(
        flow,
        task["addresses"],
        task["number"],
        epoch_interval=SNAPSHOTS,
        recovery_config=recovery,
        worker_count_per_proc=1,
    )
    ended_s = time.monotonic()
    unit = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    result = {**vars(flows.measured), "ended_s": ended_s, "peak_bytes": peak_bytes}
    Path(task["result"]).write_text(json.dumps(result))


def _free_addresses() -> list[str]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return [f"127.0.0.1:{server.getsockname()[1]}" for server in (one, other)]


if __name__ == "__main__":
    main()
