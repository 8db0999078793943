"""A process that runs some seeds of a job: it reads the job and the seeds, and writes a line for each run.

It is started by `campaign`, with a PYTHONHASHSEED of its own. What functions of the job print goes to stderr.
"""

from __future__ import annotations

import os
import pickle
import sys
from typing import BinaryIO

import msgspec

from midstream.runtime.process.thread_limits import limit_threads
from midstream.simulation.garbage_collection import collect, collecting_rarely
from midstream.testing.simulation.campaign import PROBE, Campaign, finished
from midstream.testing.simulation.job_scenario import REFERENCE
from midstream.testing.simulation.simulated_job import SimulatedJob
from midstream.testing.simulation.simulated_run import Ran

PART_BYTES_MAX = 1 << 31


def main() -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    limit_threads()
    given = sys.stdin.buffer
    job, output, effects, contracts, parallelisms = pickle.loads(_part(given))
    assert isinstance(job, SimulatedJob), type(job)
    seeds = msgspec.json.decode(_part(given), type=list[int])
    reference = Ran(REFERENCE, output=output, effects=effects)
    campaign = Campaign("", job, contracts, parallelisms)
    with collecting_rarely():
        for seed in (PROBE, *seeds):
            scenario = REFERENCE if seed == PROBE else campaign.scenario(seed)
            done = finished(job, reference, contracts, seed, scenario)
            answers.write(msgspec.json.encode(done) + b"\n")
            collect()


def _part(stream: BinaryIO) -> bytes:
    """Read what the parent has sent: its length, then that many bytes."""
    length = int.from_bytes(_exactly(stream, 8), "big")
    if length > PART_BYTES_MAX:
        raise ValueError(f"a part of {length:,} bytes is longer than a job can be")
    return _exactly(stream, length)


def _exactly(stream: BinaryIO, length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise EOFError(f"the parent has ended: {len(data):,} of {length:,} bytes have arrived")
    return data


if __name__ == "__main__":
    main()
