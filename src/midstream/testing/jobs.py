"""Runs a job in a test: `run` for rows in and rows out, `job` where the test controls time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from itertools import zip_longest
from typing import Any, Final, TypeAlias

import msgspec
import polars as pl
import pyarrow as pa

from midstream.api.data_stream import DataStream
from midstream.api.environment import Environment
from midstream.api.program import Program
from midstream.connectors.memory.collection_source import CollectionSource
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.connectors.memory.python_rows import table_rows
from midstream.engine.core.batches import single_batch
from midstream.engine.core.config import Duration, JobConfig, check_parallelism, duration_us
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.core.job_pickle import in_the_programs_classes
from midstream.engine.graph.logical_graph import Node
from midstream.engine.operators.base import Operator
from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator
from midstream.engine.operators.functions.process_operator import ProcessOperator
from midstream.engine.operators.source_api import DiscoveryContext, Source, rows_text
from midstream.inprocess.endpoints import FedSource
from midstream.inprocess.in_process_job import InProcessFailure, InProcessJob, JobSnapshot, noted, surfaced
from midstream.inprocess.rewrite import End, rewritten
from midstream.testing.inputs import LAST_US, Cut, Instant, Rows, as_batch, as_us, batches
from midstream.testing.results import Name, Result, Row, find, only

What: TypeAlias = "Environment | DataStream | Sequence[DataStream]"
"""A job, the stream of a job that a test is about, or several of them."""
NOW: Final = datetime(2000, 1, 1, tzinfo=UTC)
"""The wall clock of a job in a test when it begins."""


def run(
    what: What,
    inputs: Mapping[str, Rows] | Rows | None = None,
    *,
    cut: Cut = 1,
    parallelism: int = 1,
    now: Instant = NOW,
    restore: JobSnapshot | None = None,
    allow_dropped_state: bool = False,
    ends: bool = True,
) -> Result:
    """Run a job, or only what one of its streams needs, on the given rows.

    `what`: an Environment, a stream, or several streams of one.
    `inputs`: rows by the uid or name of a source, or just rows if there is one source: dicts, a polars DataFrame, or an
    Arrow table or batch. A column that a dict lacks is null, and a time may be an ISO string. A collection or a bounded
    generator may be left out, and then has its own rows.
    `cut`: how many rows a source has at a time: a number, "whole" for all of one input, or a list of numbers of which
    the last is repeated. A batch has no more rows than that, and operators may get fewer at a time, as in a real job.
    Several sources take turns, batch by batch.
    `parallelism`: the number of subtasks of each operator.
    `now`: the wall clock, which stands still: an ISO string, a datetime (UTC if it has no zone), or microseconds since
    1970.
    `restore`: a snapshot from which to resume, see `RunningJob.snapshot`.
    `allow_dropped_state`: resume even if the snapshot has state that the job no longer has.
    `ends`: whether the input ends, so that all windows and timers fire, as in a job with bounded sources. A bounded source
    without event time ends after its last row in any case: until then it holds back event time.

    Returns the output of every sink, stream end and side output. Raises what a function of the job raised, with a note
    of the operator and the row; ConfigError for unknown names; SchemaError for rows that do not fit; JobError for a
    source that only a real job can read and that is given no rows.

        >>> dear = orders.filter(pl.col("price") > 3).uid("dear")
        >>> result = testing.run(dear, [{"user": "eve", "price": 9}, {"user": "eve", "price": 1}])
        >>> result["dear"]
        [{'user': 'eve', 'price': 9}]
    """
    with job(
        what, parallelism=parallelism, now=now, restore=restore, allow_dropped_state=allow_dropped_state
    ) as running:
        running._feed_turns(inputs, cut, ends_tables=True)
        if ends:
            running.end()
        return running.result()


def job(
    what: What,
    *,
    parallelism: int = 1,
    now: Instant = NOW,
    restore: JobSnapshot | None = None,
    allow_dropped_state: bool = False,
) -> RunningJob:
    """Return a job that runs for as long as the `with` block, and does only what the test requests.

    `what`: an Environment, a stream, or several streams of one.
    `parallelism`: the number of subtasks of each operator. Those of a source get its batches in turn, and event time
    is that of the slowest; `advance_to` advances all.
    `now`: the wall clock at the beginning; it stands still until the test advances it.
    `restore`: a snapshot from which to resume, see `RunningJob.snapshot`.
    `allow_dropped_state`: resume even if the snapshot has state that the job no longer has.

    Returns a RunningJob. Raises ConfigError if `what` is not a job, and the errors of operators that cannot be opened.

        >>> per_minute = clicks.key_by("user").window(tumbling("1 min")).aggregate(n=Count())
        >>> with testing.job(per_minute) as job:
        ...     _ = job.feed("clicks", {"user": "ann", "at": "2024-01-01 12:00:30"})
        ...     _ = job.advance_to("2024-01-01 12:01")
        ...     [row["n"] for row in job.take()]
        [1]
    """
    return RunningJob(what, parallelism=parallelism, now=now, restore=restore, allow_dropped_state=allow_dropped_state)


class RunningJob:
    """A job in a test. Each call returns when everything that follows from it has been done.

    For example:

        >>> with testing.job(orders) as job:
        ...     _ = job.feed({"user": "eve", "price": 9})
        ...     job.take()
        [{'user': 'eve', 'price': 9}]
    """

    def __init__(
        self,
        what: What,
        *,
        parallelism: int,
        now: Instant,
        restore: JobSnapshot | None,
        allow_dropped_state: bool = False,
    ) -> None:
        program, config, ends = _program_of(what)
        if restore is not None and not isinstance(restore, JobSnapshot):
            raise ConfigError(f"restore: {restore!r} is not a snapshot; give the result of snapshot() of a running job")
        if parallelism != 1:
            check_parallelism(parallelism, config.max_parallelism, "the job")
        self._sources: dict[str, tuple[str, Source]] = {}
        self._schemas: dict[str, pa.Schema] = {}
        made = rewritten(program.graph, ends, self._fed_source)
        self._outputs = made.outputs
        self._fed: dict[str, int] = {}
        """The number of rows fed to each source, by uid."""
        self._given: dict[str, int] = {}
        """The number of batches of each output that `take` has returned, by id."""
        config = msgspec.structs.replace(config, parallelism=parallelism)
        now_us = as_us(now, "now") if restore is None else restore.now_us
        with _Surfacing():
            self._engine = InProcessJob(made.graph, config, now_us, restore, allow_dropped_state=allow_dropped_state)
        self._event_times = self._engine.event_times()

    def _fed_source(self, uid: str, node: Node) -> Source:
        assert node.source is not None
        self._sources[uid] = node.name, node.source
        return FedSource(uid, node.source)

    def __enter__(self) -> RunningJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all functions. Called at the end of the `with` block.

        For example:

            >>> job = testing.job(orders)
            >>> job.close()
        """
        self._engine.close()

    # ---- rows ----

    def feed(self, source: str | Rows, rows: Rows | None = None, *, cut: Cut = 1) -> RunningJob:
        """Feed rows to one source, by default one per batch.

        `source`: the uid or name of the source; `feed(rows)` is enough if there is only one.
        `rows`: a dict or several, a polars DataFrame, or an Arrow table or batch.
        `cut`: how rows are cut into batches, as for `run`.

        Returns the job. Raises ConfigError for an unknown name, SchemaError for rows that do not fit, JobError if the
        source has ended, and what a function of the job raises.

            >>> with testing.job(orders) as job:
            ...     len(job.feed("orders", [{"user": "eve", "price": 9}] * 3, cut="whole").take())
            3
        """
        given: Rows | str
        if rows is None:
            uid, given = self._only_source("feed"), source
        else:
            uid, given = self._source(source, "feed"), rows
        for batch in batches(as_batch(given, self._schema(uid), f"input {uid!r}"), cut):
            self._feed(uid, batch)
        return self

    def feed_all(self, inputs: Mapping[str, Rows] | Rows | None = None, *, cut: Cut = 1) -> RunningJob:
        """Feed rows to all sources, which take turns; bounded sources that are not given have their own rows.

        As in a real job, a bounded source without event time holds back that of the others until `end` is called for it.

        `inputs`: rows by the uid or name of a source, or just rows if there is one source.
        `cut`: how rows are cut into batches, as for `run`.

        Returns the job. Raises as `feed` does, and JobError for a source that only a real job can read and that is
        given no rows.

            >>> with testing.job(orders) as job:
            ...     len(job.feed_all().take())
            3
        """
        self._feed_turns(inputs, cut, ends_tables=False)
        return self

    def _feed_turns(self, inputs: Mapping[str, Rows] | Rows | None, cut: Cut, *, ends_tables: bool) -> None:
        """Feed rows to all sources in turns. `ends_tables`: a bounded source without event time ends after its last row,
        as in a real job; until then it holds back event time.
        """
        given = self._named(inputs)
        parts = {uid: list(batches(batch, cut)) for uid, batch in given.items()}
        tables = {uid for uid, (_, source) in self._sources.items() if source.bounded and not self._event_times[uid]}
        if ends_tables:
            self._end_each(uid for uid in tables if not parts[uid])
        for number, turn in enumerate(zip_longest(*parts.values())):
            for uid, batch in zip(parts, turn, strict=True):
                if batch is not None:
                    self._feed(uid, batch)
                    if ends_tables and uid in tables and number + 1 == len(parts[uid]):
                        self._end_each([uid])

    def _feed(self, uid: str, batch: pa.RecordBatch) -> None:
        if self._engine.has_ended(uid):
            raise JobError(f"input {uid!r} has ended, but is given another row")
        first = self._fed.get(uid, 0)
        self._fed[uid] = first + batch.num_rows
        with _Surfacing(f"{rows_text(first, first + batch.num_rows - 1)} of the input {uid!r}, counted from 0"):
            self._engine.feed(uid, batch)

    def end(self, *sources: str) -> RunningJob:
        """End sources. Once all have ended, all windows and timers fire.

        `sources`: their uids or names; without any, all end.

        Returns the job. Raises ConfigError for an unknown name, and what a function of the job raises.

            >>> per_hour = clicks.key_by("user").window(tumbling("1 h")).aggregate(n=Count())
            >>> with testing.job(per_hour) as job:
            ...     [row["n"] for row in job.feed_all().end("clicks").take()]
            [2]
        """
        self._end_each([self._source(name, "end") for name in sources] or self._sources)
        return self

    def _end_each(self, uids: Iterable[str]) -> None:
        with _Surfacing():
            for uid in uids:
                if not self._engine.has_ended(uid):
                    self._engine.end(uid)

    # ---- time ----

    def advance_to(self, at: Instant, *sources: str) -> RunningJob:
        """Advance event time: windows and timers up to a time fire, and later rows at or before it are late.

        Event time never goes back. As in a real job, a bounded source without event time holds it back where its rows
        meet those of others: call `end` with its name first.

        `at`: an ISO string such as "2024-01-01 12:05", a datetime (UTC if it has no zone), or microseconds since 1970.
        `sources`: the sources whose rows' event time is advanced, by uid or name; without any, that of all inputs.

        Returns the job. Raises ConfigError for another time or an unknown name, JobError for a source whose rows have
        no event time, and what a function of the job raises.

            >>> per_hour = clicks.key_by("user").window(tumbling("1 h")).aggregate(n=Count())
            >>> with testing.job(per_hour) as job:
            ...     [row["n"] for row in job.feed_all().advance_to("2024-01-01 13:00").take()]
            [2]
        """
        us = as_us(at, "advance_to")
        uids = None
        if sources:
            named = {name: self._event_times[self._source(name, "advance_to")] for name in sources}
            for name, found in named.items():
                if not found:
                    raise JobError(
                        f"advance_to: rows of {name!r} have no event time; call with_watermarks() in the job"
                    )
            uids = [uid for found in named.values() for uid in found]
        with _Surfacing():
            self._engine.advance_to(us, uids)
        return self

    def advance_processing_time(self, by: Duration) -> RunningJob:
        """Advance the wall clock: processing-time timers fire, unbounded inputs become idle.

        `by`: a duration such as "10 s", a number of seconds, or a timedelta.

        Returns the job. Raises ConfigError for an invalid duration and for a time after the year 9999, and what a
        function of the job raises.

            >>> with testing.job(orders) as job:
            ...     print(job.advance_processing_time("1 min").now)
            2000-01-01 00:01:00+00:00
        """
        by_us = duration_us(by, "advance_processing_time")
        until_us = self._engine.loop.now_us + by_us
        if until_us > LAST_US:
            raise ConfigError(
                f"advance_processing_time: {by} from {self.now} is after the year 9999, the last that is supported"
            )
        with _Surfacing():
            self._engine.advance_processing_time(until_us)
        return self

    @property
    def now(self) -> datetime:
        """The wall clock of the job, in UTC."""
        return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=self._engine.loop.now_us)

    # ---- output ----

    def take(self, output: Name | None = None) -> list[Row]:
        """Return the rows of an output since `take` was last called.

        `output`: the uid or name of a sink or of the operator at the end of a stream, the tag of a side output (or uid
        and tag), the stream itself, or what `collect()` returned; without it, the only output.

        Returns dicts, in order of arrival. Raises ConfigError for an unknown or ambiguous name.

            >>> with testing.job(orders) as job:
            ...     first = job.feed({"user": "eve", "price": 9}).take()
            ...     job.feed({"user": "eve", "price": 8}).take()
            [{'user': 'eve', 'price': 8}]
        """
        found = only(self._outputs) if output is None else find(self._outputs, output)
        taken = self._engine.taken[found.id]
        new = taken[self._given.get(found.id, 0) :]
        self._given[found.id] = len(taken)
        return table_rows(pa.Table.from_batches(new, schema=found.schema))

    def result(self) -> Result:
        """Return the whole output so far.

        For example:

            >>> with testing.job(orders) as job:
            ...     len(job.feed_all().result().rows)
            3
        """
        return Result(self._outputs, self._engine.taken)

    # ---- state ----

    def state(self, operator: str) -> dict[str, Any]:
        """Return the contents of the states of an operator's function.

        `operator`: its uid or name.

        Returns them by the state's name: values by key, or a table as a polars DataFrame. Raises ConfigError for an
        unknown or ambiguous name, JobError for a value that cannot be copied.

            >>> per_user = orders.key_by("user").process(Total(), {"user": str, "total": int}).uid("totals")
            >>> with testing.job(per_user) as job:
            ...     job.feed_all().state("totals")
            {'total': {'ann': 7, 'bob': 5}}
        """
        held = _contents(self.operators(operator), operator)
        try:
            return in_the_programs_classes(held, self._engine.originals)
        except Exception as error:  # of a value's own class
            raise JobError(f"state of {operator!r}: a value cannot be copied: {error}") from error

    def metrics(self, operator: str) -> dict[str, float]:
        """Return the value of each counter, and of each gauge that was set, of an operator's function: the sum over
        subtasks.

        They are reset by a restore.

        `operator`: its uid or name.

        Raises ConfigError for an unknown or ambiguous name.

            >>> class Counted(KeyedProcessFunction):
            ...     def process(self, row, ctx):
            ...         ctx.metrics.counter("orders").inc()
            >>> counted = orders.key_by("user").process(Counted(), {"user": str}).uid("counted")
            >>> with testing.job(counted) as job:
            ...     job.feed_all().metrics("counted")
            {'orders': 3}
        """
        found: dict[str, float] = {}
        for one in self.operators(operator):
            if one.user_metrics is not None:
                for name, value in (one.user_metrics.counters | one.user_metrics.gauges).items():
                    found[name] = found.get(name, 0) + value
        return found

    def operators(self, operator: str) -> list[Operator]:
        """Return the running operators of that uid or name, one per subtask."""
        return self._engine.operators(self._operator(operator))

    def snapshot(self) -> JobSnapshot:
        """Take a checkpoint of the job as it is now, for a test of an upgrade.

        Returns a snapshot, from which `testing.job(changed, restore=snapshot)` resumes, any number of times.

            >>> per_user = orders.key_by("user").process(Total(), {"user": str, "total": int}).uid("totals")
            >>> with testing.job(per_user) as job:
            ...     snapshot = job.feed({"user": "ann", "price": 3}).snapshot()
            >>> with testing.job(per_user, restore=snapshot) as job:
            ...     job.feed({"user": "ann", "price": 4}).take()
            [{'user': 'ann', 'total': 7}]
        """
        with _Surfacing():
            return self._engine.snapshot()

    def snapshot_and_restore(self, parallelism: int | None = None) -> RunningJob:
        """Restore the job as if it had failed after a checkpoint: everything is rebuilt, with the stored state.

        What objects of the job keep outside of their states is lost.

        `parallelism`: the number of subtasks from then on, as for `job`; None for as many as before.

        Returns the job. Raises ConfigError for another number, and what a function of the job raises.

            >>> per_user = orders.key_by("user").process(Total(), {"user": str, "total": int}).uid("totals")
            >>> with testing.job(per_user) as job:
            ...     _ = job.feed({"user": "ann", "price": 3}).snapshot_and_restore(parallelism=3)
            ...     job.feed({"user": "ann", "price": 4}).take()[-1]
            {'user': 'ann', 'total': 7}
        """
        config = self._engine.plan.config
        if parallelism is not None:
            check_parallelism(parallelism, config.max_parallelism, "snapshot_and_restore")
        with _Surfacing():
            self._engine.restore(self._engine.snapshot(), parallelism or config.parallelism)
        return self

    # ---- names ----

    def _schema(self, uid: str) -> pa.Schema:
        return self._sources[uid][1].schema

    def _named(self, inputs: Mapping[str, Rows] | Rows | None) -> dict[str, pa.RecordBatch]:
        """Return the inputs by uid, in the order of the program."""
        if inputs is None:
            inputs = {}
        elif not isinstance(inputs, Mapping) or not self._are_names(inputs):
            inputs = {self._only_source("inputs"): inputs}
        given = {self._source(name, "inputs"): rows for name, rows in inputs.items()}
        return {
            uid: as_batch(given[uid], self._schema(uid), f"input {uid!r}")
            if uid in given
            else _own_rows(uid, source, has_event_time=bool(self._event_times[uid]))
            for uid, (name, source) in self._sources.items()
        }

    def _are_names(self, inputs: Mapping[str, Any]) -> bool:
        """Whether the keys are names of sources rather than the columns of one row."""
        if len(self._sources) != 1 or not inputs:
            return True
        [(uid, (name, source))] = self._sources.items()
        is_a_row = all(column in source.schema.names for column in inputs) and not {uid, name} & inputs.keys()
        return not is_a_row and (bool({uid, name} & inputs.keys()) or all(map(_may_be_rows, inputs.values())))

    def _source(self, name: object, where: str) -> str:
        if name in self._sources:
            return str(name)
        found = [uid for uid, (shown, _) in self._sources.items() if shown == name]
        if len(found) == 1:
            return found[0]
        known = ", ".join(map(repr, self._sources))
        several = f"the name of {len(found)} sources" if found else "no source of the job"
        raise ConfigError(f"{where}: {name!r} is {several}; name one by its uid: {known}")

    def _only_source(self, where: str) -> str:
        if len(self._sources) != 1:
            known = ", ".join(map(repr, self._sources))
            raise ConfigError(
                f"{where}: the job has {len(self._sources)} sources, so name the source of these rows: {known}"
            )
        return next(iter(self._sources))

    def _operator(self, name: str) -> str:
        specs = self._engine.operator_names
        if name in specs:
            return name
        found = [uid for uid, shown in specs.items() if shown == name]
        if len(found) == 1:
            return found[0]
        raise ConfigError(
            f"operator {name!r}: the job has {len(found)} of that name; uids are {', '.join(specs) or 'none'}"
        )


def _program_of(what: What) -> tuple[Program, JobConfig, list[End] | None]:
    if isinstance(what, Environment):
        return what.program, what.program.config, None
    streams = [what] if isinstance(what, DataStream) else list(what) if isinstance(what, Iterable) else []
    if not streams or not all(isinstance(stream, DataStream) for stream in streams):
        raise ConfigError(f"{what!r} is neither an Environment nor a stream; give a job, or the stream to test")
    if len({id(stream.core.program) for stream in streams}) > 1:
        raise ConfigError("the streams are of different Environments; give those of one")
    ends = [
        End(tuple((origin.node, origin.tag) for origin in stream.core.origins), stream.schema) for stream in streams
    ]
    program = streams[0].core.program
    return program, program.config, ends


def _may_be_rows(value: object) -> bool:
    return isinstance(value, (list, tuple, Mapping, pl.DataFrame, pa.Table, pa.RecordBatch))


def _own_rows(uid: str, source: Source, has_event_time: bool) -> pa.RecordBatch:
    """Return all rows of a source that has them in memory. Raises JobError for others."""
    if not isinstance(source, (CollectionSource, GeneratorSource)) or not source.bounded:
        of_spark = type(source).__module__.startswith("midstream.spark")
        why = "is read with Spark" if of_spark else "has no end" if not source.bounded else "is not in memory"
        raise JobError(
            f"source {uid!r} ({type(source).__name__}) {why}, so a test does not read it; give it rows, or [] for "
            f"none: inputs={{{uid!r}: [{{…}}, …]}}"
        )
    found = source.discover(None, DiscoveryContext(uid, 1, None))
    if has_event_time and len(found.splits) > 1:
        raise JobError(
            f"source {uid!r} is read in {len(found.splits)} splits, each with its own event time, but a test has one "
            f"per source; make it with splits=1, or give it rows: inputs={{{uid!r}: [{{…}}, …]}}"
        )
    parts = []
    for split in found.splits:
        reader = source.open_split(split)
        while (read := reader.read(131_072)) is not None:
            parts.append(read[0])
        reader.close()
    return single_batch(pa.Table.from_batches(parts, schema=source.schema))


def _contents(operators: Sequence[Operator], name: str) -> dict[str, Any]:
    """Return the contents over all subtasks of one operator. Raises ConfigError for one without declared states."""
    found: dict[str, Any] = {}
    for operator in operators:
        if isinstance(operator, ProcessOperator):
            for state, entries in operator.contents().items():
                found.setdefault(state, {}).update(entries)
        elif isinstance(operator, BatchFunctionOperator):
            for state, frame in operator.contents().items():
                found[state] = frame if state not in found else pl.concat([found[state], frame])
        else:
            raise ConfigError(f"operator {name!r} has no states that a function declares ({type(operator).__name__})")
    return found


class _Surfacing:
    """Raises what a function of the job raised, unchanged, in the test. `location`: what the job was processing.

    A class, since a context manager that is a generator cannot raise StopIteration.
    """

    def __init__(self, location: str = "") -> None:
        self._location = location

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, failure: BaseException | None, traceback: object) -> None:
        if isinstance(failure, InProcessFailure):
            error = surfaced(failure)
            if self._location and self._location not in failure.summary:
                noted(error, f"while the job processed {self._location}")
            raise error.with_traceback(error.__traceback__) from error.__cause__
