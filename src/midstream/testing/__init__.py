"""Tests of a job, in process: `run`, `job`, `harness`, `check_cuts`, `simulate`, and contract checks for users'
connectors.

No processes, no JVM, no files: the engine itself (`inprocess`) runs, with its operators, states and watermarks, in the
thread of the test, and time stands still until the test advances it; `simulate` puts a job through failures in the
simulator's world (`simulation`). May import every package but `cli`; nothing but `cli` imports it.

Reading order: `jobs` (run, job), `inputs` and `results`, `cuts`, `function_harness`, `sources`, `sinks` and
`aggregates` (contract checks); then `simulate` and `simulation`.
"""

from midstream.testing.aggregates import check_aggregate as check_aggregate
from midstream.testing.cuts import check_cuts as check_cuts
from midstream.testing.function_harness import Harness as Harness
from midstream.testing.function_harness import harness as harness
from midstream.testing.jobs import RunningJob as RunningJob
from midstream.testing.jobs import job as job
from midstream.testing.jobs import run as run
from midstream.testing.results import Result as Result
from midstream.testing.simulate import simulate as simulate
from midstream.testing.sinks import check_sink as check_sink
from midstream.testing.sources import check_source as check_source

__all__ = [
    "Harness",
    "Result",
    "RunningJob",
    "check_aggregate",
    "check_cuts",
    "check_sink",
    "check_source",
    "harness",
    "job",
    "run",
    "simulate",
]
