"""`simulate`: runs a user's job through failures, restores, rescales, other batches and other orders, in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import polars as pl
import pyarrow as pa
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

from midstream.api.data_stream import DataStream
from midstream.api.environment import Environment
from midstream.api.stream_core import StreamCore
from midstream.api.user_modules import top_level_names
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.core.job_pickle import pickled
from midstream.engine.graph.graph_builder import assign_uids
from midstream.engine.graph.logical_graph import LogicalGraph, Node
from midstream.engine.operators.sink_operator import SinkOperator
from midstream.inprocess.rewrite import needed
from midstream.testing.simulation.campaign import Campaign, Report
from midstream.testing.simulation.output_compare import Contract
from midstream.testing.simulation.simulated_job import (
    PARALLELISMS,
    ROWS_MAX,
    Given,
    SimulatedJob,
    SinkPlaceholder,
    simulated_job,
)

Rows: TypeAlias = pa.Table | pa.RecordBatch | pl.DataFrame | Sequence[Mapping[str, Any]] | str | os.PathLike[str]
"""The rows of one source: an Arrow table, a polars DataFrame, a Parquet, CSV or JSON lines file, or dicts as for
`testing.run`.
"""
OUTPUT: Final = "output"
"""The uid of the sink that is added to a stream that is simulated on its own."""


def simulate(
    job: Environment | DataStream,
    inputs: Mapping[str, Rows] | None = None,
    *,
    seeds: Iterable[int] = range(50),
    rows_max: int = ROWS_MAX,
    parallelism: int | Sequence[int] | None = None,
    latest: Mapping[str, Sequence[str]] | None = None,
    ignore: Mapping[str, Sequence[str]] | None = None,
    jobs: int = 1,
    seconds: float | None = None,
) -> Report:
    """Raise AssertionError unless the job's output with failures equals its output without.

    The graph of `job` runs in a simulated cluster, once without failures, then once for each of `seeds`: with tasks and
    drivers that die, restarts at another parallelism, unaligned checkpoints, savepoints, other batches, other speeds of
    its inputs, another clock. Its sinks must commit the same rows each time, in any order. Its real sinks are never
    opened.

    `job`: an Environment, or a stream: then what it depends on is run, and its rows are the output.
    `inputs`: rows of sources, by uid: tables, DataFrames, dicts, or the name of a Parquet, CSV or JSON lines file. Of
    other sources the first `rows_max` rows are read, once, in this process.
    `seeds`: one run each.
    `rows_max`: the limit on rows that are read of a source that is given none.
    `parallelism`: the ones to try, by default 1 to 4.
    `latest`: keys of sinks that get a stream of updates, by uid: only the last row of each key counts.
    `ignore`: columns that may differ, by uid of a sink.
    `jobs`: the number of processes.
    `seconds`: the time after which no further run begins; None for no limit.

    Returns a Report. Raises JobError, ConfigError or SchemaError for a job that cannot be simulated.

        >>> per_user = orders.key_by("user").process(Total(), {"user": str, "total": int})
        >>> testing.simulate(per_user, seeds=range(3), parallelism=(1, 2)).seeds
        3
    """
    campaign = campaign_of(
        job,
        inputs or {},
        rows_max=rows_max,
        parallelism=parallelism,
        latest=latest or {},
        ignore=ignore or {},
        jobs=jobs,
        seconds=seconds,
    )
    chosen = list(seeds)
    if not chosen:
        raise ConfigError("seeds: there are no seeds; give for example range(50)")
    report = campaign.go(chosen)
    if not report.ok:
        raise AssertionError(report.text)
    return report


def campaign_of(
    job: Environment | DataStream,
    inputs: Mapping[str, Rows],
    *,
    rows_max: int = ROWS_MAX,
    parallelism: int | Sequence[int] | None = None,
    latest: Mapping[str, Sequence[str]],
    ignore: Mapping[str, Sequence[str]],
    jobs: int = 1,
    seconds: float | None = None,
    replay: str = "",
) -> Campaign:
    """Return the campaign of a job. Arguments and errors as for `simulate`. `replay`: the command that simulates the
    job again.
    """
    logical, config, own_names = _graph_of(job)
    given = {uid: _given(rows, uid) for uid, rows in inputs.items()}
    made = simulated_job(logical, config, given, rows_max=rows_max, own_names=own_names)
    requested = PARALLELISMS if parallelism is None else (parallelism,) if isinstance(parallelism, int) else parallelism
    if not requested:
        raise ConfigError("parallelism: the list is empty; give for example (1, 2)")
    if jobs < 1:
        raise ConfigError(f"jobs: {jobs} is not a positive whole number")
    return Campaign(
        config.name,
        made,
        _contracts(made, latest, ignore),
        made.parallelisms(requested),
        jobs=jobs,
        seconds=seconds,
        replay=replay,
    )


def _graph_of(job: Environment | DataStream) -> tuple[LogicalGraph, JobConfig, frozenset[str]]:
    if not isinstance(job, (Environment, DataStream)):
        raise JobError(f"simulate: {job!r} is neither an Environment nor a stream")
    program = job.program if isinstance(job, Environment) else job.core.program
    graph = program.graph if isinstance(job, Environment) else _graph_of_stream(job.core)
    return graph, program.config, top_level_names(program.collected(pickled(graph)))


def _graph_of_stream(stream: StreamCore) -> LogicalGraph:
    """Return what the stream depends on, and a sink after it."""
    inputs = stream.inputs()
    kept = needed(stream.program.graph, [entry.node for entry in inputs])
    numbers = {node.id: number for number, node in enumerate(kept)}
    uids = assign_uids(stream.program.graph.nodes)
    graph = LogicalGraph()
    for node in kept:
        moved = tuple(replace(entry, node=numbers[entry.node]) for entry in node.inputs)
        graph.nodes.append(replace(node, id=numbers[node.id], uid=uids[node.id], inputs=moved))
    placeholder = SinkPlaceholder()
    moved = tuple(replace(entry, node=numbers[entry.node]) for entry in inputs)
    operator = SinkOperator(OUTPUT, placeholder, stream.schema)
    graph.add(Node("sink", OUTPUT, OUTPUT, inputs=moved, operator=operator, sink=placeholder))
    return graph


def _given(rows: Rows, uid: str) -> Given:
    """Return the given rows. Raises ConfigError for a file that cannot be read, JobError for other values than rows."""
    if isinstance(rows, pa.Table):
        return rows
    if isinstance(rows, pa.RecordBatch):
        return pa.Table.from_batches([rows])
    if isinstance(rows, pl.DataFrame):
        return rows.to_arrow()
    if isinstance(rows, (str, os.PathLike)):
        return _read(Path(rows), uid)
    if isinstance(rows, Sequence) and all(isinstance(row, Mapping) for row in rows):
        return cast(Sequence[Mapping[str, Any]], rows)
    raise JobError(
        f"the rows for source {uid!r} are a {type(rows).__name__}; give a table, a DataFrame, dicts, or the name of a file"
    )


def _read(path: Path, uid: str) -> pa.Table:
    readers: dict[str, Callable[[Path], pa.Table]] = {
        ".parquet": pyarrow.parquet.read_table,
        ".csv": pyarrow.csv.read_csv,
        ".json": pyarrow.json.read_json,
        ".jsonl": pyarrow.json.read_json,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise ConfigError(
            f"rows of {uid!r}: {path} ends with {path.suffix or 'nothing'}; rows are read from {', '.join(readers)} files"
        )
    try:
        table: pa.Table = reader(path)
    except (OSError, pa.ArrowException) as error:
        raise ConfigError(f"rows of {uid!r}: {path} cannot be read: {error}") from error
    return table


def _contracts(
    job: SimulatedJob, latest: Mapping[str, Sequence[str]], ignore: Mapping[str, Sequence[str]]
) -> dict[str, Contract]:
    found: dict[str, Contract] = {}
    for uid in (*latest, *ignore):
        node = job.node_of.get(uid)
        if node is None or node.sink is None:
            raise ConfigError(f"{uid!r} is not a sink of this job; its sinks are {', '.join(map(repr, job.sinks))}")
        assert node.operator is not None
        names = node.inputs[0].schema.names
        for name in (*latest.get(uid, ()), *ignore.get(uid, ())):
            if name not in names:
                raise ConfigError(f"sink {uid!r} has no column {name!r}; it has {', '.join(names)}")
        found[uid] = Contract(tuple(latest.get(uid, ())), tuple(ignore.get(uid, ())))
    return found
