"""Where the time of a simulated run goes: a sample of the stack every millisecond of processor time.

    POLARS_MAX_THREADS=1 python benchmarks/simulated_run.py [small|single|random] [runs]

Each sample counts for the innermost function of midstream on the stack, with what it calls elsewhere; all below the
oracle, an invariant's `check` or the collection of garbage counts for that.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from types import FrameType

import midstream
from midstream.runtime.process.thread_limits import limit_threads
from midstream_lab.bench.simulate import WARM_UP_RUNS, random, small
from midstream_lab.campaign import collect, collecting_rarely
from midstream_lab.run import run
from midstream_lab.scenarios.scenario import Scenario

HOME = os.path.dirname(midstream.__file__) + os.sep
SCENARIOS: dict[str, Callable[[int], Scenario]] = {
    "small": partial(small, parallelism=2),
    "single": partial(small, parallelism=1),
    "random": random,
}
SIMULATOR = {
    "rows.py": "operators, sources, sinks",
    "tally.py": "operators, sources, sinks",
    "timed.py": "operators, sources, sinks",
    "tables.py": "operators, sources, sinks",
    "cluster.py": "drivers, slots, connections, disks",
    "network.py": "drivers, slots, connections, disks",
    "disk.py": "drivers, slots, connections, disks",
}


def place(frame: FrameType | None) -> str:
    """What the top of this stack counts for."""
    inner = ""
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(HOME):
            file, name = path[len(HOME) :], frame.f_code.co_name
            if file == "lab/midstream_lab/checkers/checkpoint_checker.py":
                return "sim: the oracle"
            if name == "check" and not file.startswith("sim/"):
                return "invariants of the engine"
            if (file, name) == ("lab/midstream_lab/campaign.py", "collect"):
                return "sim: freeing a run"
            inner = inner or file
        frame = frame.f_back
    room, _, file = inner.partition("/")
    return f"sim: {SIMULATOR.get(file, 'order of steps, faults, building a run')}" if room == "sim" else room


def main(kind: str, runs: int) -> None:
    limit_threads()
    scenario = SCENARIOS[kind]
    found: Counter[str] = Counter()
    with collecting_rarely():
        for number in range(WARM_UP_RUNS):
            run(scenario(number))
            collect()
        signal.signal(signal.SIGPROF, lambda _, frame: found.update((place(frame),)))
        signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)
        began_s = time.process_time()
        for number in range(runs):
            run(scenario(number))
            collect()
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        took_s = time.process_time() - began_s
    print(f"{runs} {kind} runs, {1000 * took_s / runs:.1f} ms each, {found.total()} samples")
    for what, samples in found.most_common():
        print(f"{100 * samples / found.total():5.1f} %  {what or 'elsewhere'}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "small", int(sys.argv[2]) if len(sys.argv) > 2 else 400)
