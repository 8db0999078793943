"""The simulated job: a user's graph with sources that return recorded rows and sinks that record theirs."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import msgspec
import pyarrow as pa

from midstream.engine.core.batches import canonical_schema, conform
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ConfigError, JobError, MidstreamError, SchemaError
from midstream.engine.core.job_pickle import ApartUnpickler, JobPickler
from midstream.engine.graph.graph_builder import assign_uids, build_job_graph
from midstream.engine.graph.job_graph import JobGraph
from midstream.engine.graph.logical_graph import Input, LogicalGraph, Node
from midstream.engine.operators.sink_api import Sink, SinkWriter, WriterContext
from midstream.engine.operators.sink_operator import SinkOperator
from midstream.engine.operators.source_api import Discovery, DiscoveryContext, Source, Split, SplitReader
from midstream.engine.operators.windows.pane_windows import PaneWindowOperator
from midstream.engine.operators.windows.window_aggregation import WindowAggregation
from midstream.engine.operators.windows.window_factory import LATE
from midstream.engine.operators.windows.window_operator import WindowOperator
from midstream.engine.state.job_code import own_code
from midstream.inprocess.own_modules import by_value, own_modules, user_code
from midstream.testing.inputs import as_batch
from midstream.testing.simulation.surroundings import by_name

ROWS_MAX: Final = 200
"""The default number of rows of each source."""
SPLITS_MAX: Final = 4
"""The largest number of splits of each source that are recorded."""
PARALLELISMS: Final = (1, 2, 3, 4)
TAP: Final = "tap of "
"""The prefix of the uid of a tap."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The rows of one source: a table for each split, in the order in which they were found."""

    splits: tuple[pa.Table, ...]
    follows: tuple[bool, ...]
    has_more: bool = False
    """Whether the source has more rows than were read."""

    @property
    def rows(self) -> int:
        return sum(table.num_rows for table in self.splits)

    def first(self, rows: int) -> Recorded:
        """Return the first `rows` rows, taken from all splits in turns, so that all of them get shorter."""
        left = rows
        counts = [0] * len(self.splits)
        for index, table in enumerate(self.splits):
            counts[index] = min(table.num_rows, left // (len(self.splits) - index))
            left -= counts[index]
        return Recorded(tuple(t.slice(0, n) for t, n in zip(self.splits, counts, strict=True)), self.follows)


Given: TypeAlias = pa.Table | Sequence[Mapping[str, Any]]
"""The rows of one source."""


class Placeholder(Source):
    """Replaces a recorded source in the stored graph; a run replaces it by its own source."""

    blocking = False

    def __init__(self, of: Source) -> None:
        self.schema, self.bounded, self.splits_end = of.schema, of.bounded, of.splits_end

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        raise NotImplementedError(f"the source {context.uid!r} is only read in a simulated run")

    def open_split(self, split: Split) -> SplitReader:
        raise NotImplementedError(f"split {split.id} is only read in a simulated run")


class SinkPlaceholder(Sink):
    """Replaces a sink in the stored graph; a run replaces it by its ledger."""

    def writer(self, context: WriterContext) -> SinkWriter:
        raise NotImplementedError(f"the sink {context.uid!r} is only written in a simulated run")


@dataclass(frozen=True, slots=True)
class SourceLine:
    """Where an operator, source or sink is created in the user's program."""

    uid: str
    kind: str
    name: str
    location: str
    """The file and line of the call that created it; "" if unknown."""

    def __str__(self) -> str:
        return f"{self.kind} {self.uid!r}" + (f" ({self.location})" if self.location else "")


@dataclass(slots=True)
class SimulatedJob:
    """The job: `logical` has placeholders for sources and sinks, and a uid on every node."""

    logical: LogicalGraph
    config: JobConfig
    inputs: Mapping[str, Recorded]
    """The rows by uid of the source."""
    own_names: tuple[str, ...] = ()
    """The user's modules of which each subtask has its own copy."""
    is_tapped: bool = False
    _pickled: dict[int, bytes] = field(default_factory=dict)
    _constants: list[object] = field(default_factory=list)
    """Parts of the graph that never change and take long to rebuild."""

    @property
    def sinks(self) -> dict[str, SourceLine]:
        """The sinks of the program, by uid, in its order."""
        return {uid: line for uid, line in self.outputs.items() if not uid.startswith(TAP)}

    @property
    def outputs(self) -> dict[str, SourceLine]:
        """Sinks and taps, by uid, in the order of the program."""
        return {line.uid: line for node in self.logical.nodes if node.sink for line in (source_line_of(node),)}

    @property
    def late_outputs(self) -> dict[str, str]:
        """The uid of the recorded late rows of each window whose late rows the program uses, by the window's uid."""
        windows = (node for node in self.logical.nodes if _reads_late_rows(self.logical, node))
        return {str(node.uid): _tap_uid(node, LATE) for node in windows}

    @property
    def node_of(self) -> dict[str, Node]:
        return {str(node.uid): node for node in self.logical.nodes}

    @property
    def has_own_parallelism(self) -> bool:
        """Whether an operator sets its own parallelism, above 1: then the job cannot run at any other."""
        return any((node.parallelism or 1) > 1 for node in self.logical.nodes)

    def parallelisms(self, requested: Sequence[int] = PARALLELISMS) -> tuple[int, ...]:
        """Return those of `requested` at which the job can run. Raises JobError if there are none."""
        found, refused = [], None
        for parallelism in requested:
            try:
                self.graph(parallelism)
                found.append(parallelism)
            except (JobError, ConfigError) as error:
                refused = error
        if not found:
            raise JobError(f"the job can run at none of the parallelisms {requested}: {refused}") from refused
        return tuple(found)

    def graph(self, parallelism: int) -> JobGraph:
        """Return the graph. Raises JobError or ConfigError if the job cannot run at that parallelism."""
        return build_job_graph(self.logical, msgspec.structs.replace(self.config, parallelism=parallelism))

    def pickled(self, parallelism: int) -> bytes:
        """Pickle the graph as it is shipped to every task; sources and sinks are persistent ids by their uids."""
        data = self._pickled.get(parallelism)
        if data is None:
            buffer = io.BytesIO()
            with by_value([sys.modules[name] for name in self.own_names if name in sys.modules]):
                _Pickler(buffer, self._constants).dump(self.graph(parallelism))  # type: ignore[no-untyped-call]  # cloudpickle has no annotations
            data = self._pickled[parallelism] = buffer.getvalue()
        return data

    def unpickled(self, data: bytes, sink: Sink, kind: type[Unpickler]) -> JobGraph:
        """Unpickle the result of `pickled`, with the sink of a run in it."""
        graph: JobGraph = kind(data, sink, self._constants).load()
        return graph

    def cut_off(self, rows: Mapping[str, Sequence[int]]) -> SimulatedJob:
        """Return the same job with the first rows of each split."""
        inputs = {
            uid: Recorded(tuple(t.slice(0, n) for t, n in zip(one.splits, rows[uid], strict=True)), one.follows)
            for uid, one in self.inputs.items()
        }
        return replace(self, inputs=inputs)

    def tapped(self) -> SimulatedJob:
        """Return the same job with the output of every operator recorded, and the late rows of every window."""
        graph = LogicalGraph(list(self.logical.nodes))
        for node in self.logical.nodes:
            if node.schema is not None:
                _tap(graph, node, None, node.schema)
                for tag, schema in _read_sides(self.logical, node):
                    if tag != LATE:
                        _tap(graph, node, tag, schema)
            if isinstance(node.operator, WindowOperator) and _tap_uid(node, LATE) not in self.outputs:
                _tap(graph, node, LATE, node.inputs[0].schema)
        return SimulatedJob(graph, self.config, self.inputs, self.own_names, is_tapped=True)


def _read_sides(logical: LogicalGraph, node: Node) -> dict[tuple[str, pa.Schema], None]:
    return {(i.tag, i.schema): None for n in logical.nodes for i in n.inputs if i.node == node.id and i.tag is not None}


def _tap(graph: LogicalGraph, node: Node, tag: str | None, schema: pa.Schema) -> None:
    placeholder = SinkPlaceholder()
    uid = _tap_uid(node, tag)
    operator, inputs = SinkOperator(uid, placeholder, schema), (Input(node.id, schema, tag),)
    graph.add(
        Node("tap", "", uid, node.parallelism, inputs, operator=operator, sink=placeholder, location=node.location)
    )


def _tap_uid(node: Node, tag: str | None) -> str:
    return f"{TAP}{node.uid}" + (f" {tag}" if tag else "")


def _reads_late_rows(logical: LogicalGraph, node: Node) -> bool:
    """Whether the node is a tumbling window, where a row is late as a whole, and the program reads its late rows."""
    operator = node.operator
    if not isinstance(operator, PaneWindowOperator) or not operator.is_tumbling:
        return False
    readers = (n for n in logical.nodes for i in n.inputs if i.node == node.id and i.tag == LATE)
    return any(not str(reader.uid).startswith(TAP) for reader in readers)


def source_line_of(node: Node) -> SourceLine:
    return SourceLine(str(node.uid), node.kind, node.name, node.location)


# ---- making one


def simulated_job(
    logical: LogicalGraph,
    config: JobConfig,
    inputs: Mapping[str, Given] | None = None,
    *,
    rows_max: int = ROWS_MAX,
    own_names: Iterable[str] = (),
) -> SimulatedJob:
    """Return the job to simulate.

    `inputs`: rows of sources, by uid; from other sources, the first `rows_max` rows are read now. `own_names`:
    top-level names of the modules that the job ships as files. Raises JobError for a uid that is not a source's, for a
    source of Spark without rows, and for one that cannot be read; SchemaError for rows that have other columns than the
    source.
    """
    build_job_graph(logical, config)  # errors of the program are reported first
    uids = assign_uids(logical.nodes)
    given = dict(inputs or {})
    sources = {uids[node.id]: node for node in logical.nodes if node.source is not None}
    unknown = sorted(given.keys() - sources.keys())
    if unknown:
        raise JobError(
            f"rows are given for {unknown[0]!r}; the sources of this job are {', '.join(map(repr, sources))}"
        )
    with by_value(own_modules(logical)):
        own = own_code(logical, own_names, config.trusted_packages)
    graph = LogicalGraph([_simulated(node, uids[node.id]) for node in logical.nodes])
    for node in list(graph.nodes):
        if node.operator is not None:
            node.operator.own = own
        if _reads_late_rows(graph, node):
            _tap(graph, node, LATE, node.inputs[0].schema)
    recorded = {
        uid: _given(given[uid], uid, node.source.schema) if uid in given else record(node, uid, config, rows_max)
        for uid, node in sources.items()
        if node.source is not None
    }
    for uid, rows in recorded.items():
        if not rows.rows:
            raise JobError(
                f"source {uid!r} has no rows, so there is nothing to simulate; give it some with --rows {uid}=FILE"
            )
    return SimulatedJob(graph, config, recorded, tuple(module.__name__ for module in own_modules(graph)))


def _simulated(node: Node, uid: str) -> Node:
    if node.source is not None:
        return replace(node, uid=uid, source=Placeholder(node.source))
    if node.sink is not None:
        placeholder = SinkPlaceholder()
        assert isinstance(node.operator, SinkOperator), node.label
        return replace(
            node, uid=uid, sink=placeholder, operator=SinkOperator(node.name, placeholder, node.operator.schema)
        )
    return replace(node, uid=uid)


def _given(table: Given, uid: str, schema: pa.Schema) -> Recorded:
    """Return given rows in their order, as one split."""
    if isinstance(table, pa.Table):
        missing = [name for name in schema.names if name not in table.column_names]
        if missing:
            raise SchemaError(
                f"the rows for source {uid!r} have no column {missing[0]!r}; the source has "
                f"{', '.join(f'{field.name}: {field.type}' for field in schema)}"
            )
        table = table.select(schema.names)
    batch = as_batch(table, canonical_schema(schema), f"rows for source {uid!r}")
    return Recorded((pa.Table.from_batches([batch]),), (False,))


def record(node: Node, uid: str, config: JobConfig, rows_max: int) -> Recorded:
    """Read the first rows of a source in this process: up to `SPLITS_MAX` of its splits, the same number from each."""
    source = node.source
    assert source is not None
    if type(source).__module__.startswith("midstream.spark"):
        raise JobError(
            f"source {uid!r} ({node.location or node.name}) uses Spark, which a simulated run does not start; give it "
            f"recorded rows: --rows {uid}=sample.parquet"
        )
    if rows_max < 1:
        raise ConfigError(f"--rows-max: {rows_max} is not a positive whole number")
    try:
        return _record(source, uid, config, rows_max)
    except MidstreamError as error:
        raise JobError(
            f"source {uid!r} ({node.location or node.name}) cannot be read: {error}. Give it recorded rows: "
            f"--rows {uid}=sample.parquet"
        ) from error
    finally:
        source.close()


def _record(source: Source, uid: str, config: JobConfig, rows_max: int) -> Recorded:
    found = source.discover(None, DiscoveryContext(uid, config.parallelism, None))
    requested = found.splits[:SPLITS_MAX]
    tables: list[pa.Table] = []
    follows: list[bool] = []
    left = rows_max
    has_more = len(found.splits) > len(requested)
    for number, split in enumerate(requested):
        table, is_cut = _rows_of(source, uid, split, -(-left // (len(requested) - number)))
        has_more = has_more or is_cut
        left -= table.num_rows
        if table.num_rows:
            follows.append(split.follows and bool(tables))
            tables.append(table)
    return Recorded(tuple(tables), tuple(follows), has_more)


def _rows_of(source: Source, uid: str, split: Split, rows_max: int) -> tuple[pa.Table, bool]:
    """Return the rows of a split, and whether there are more."""
    reader = source.open_split(split)
    batches: list[pa.RecordBatch] = []
    left = rows_max + 1
    try:
        while left > 0:
            read = reader.read(left)
            if read is None or (left == 1 and not read[0].num_rows):  # a live source has no more rows yet
                break
            batch, _ = read
            batches.append(batch.slice(0, left))
            left -= batch.num_rows
    finally:
        reader.close()
    made = [conform(batch, source.schema, f"source {uid!r}") for batch in batches]
    table = pa.Table.from_batches(made, source.schema)
    return table.slice(0, rows_max), table.num_rows > rows_max


# ---- pickling


class _Pickler(JobPickler):
    """Pickles sinks, schemas and aggregations as names: a run has its own objects for them, or shares them with all runs."""

    def __init__(self, buffer: io.BytesIO, constants: list[object]) -> None:
        super().__init__(buffer)
        self._constants = constants
        self._numbers = {id(item): number for number, item in enumerate(constants)}

    def reducer_override(self, item: Any) -> Any:
        return by_name(item) or super().reducer_override(item)

    def persistent_id(self, item: Any) -> object:
        if isinstance(item, SinkPlaceholder):
            return "sink"
        if type(item) is pa.Schema or (type(item) is WindowAggregation and not _has_code(item)):
            if id(item) not in self._numbers:
                self._numbers[id(item)] = len(self._constants)
                self._constants.append(item)
            return self._numbers[id(item)]
        return None


def _has_code(aggregation: WindowAggregation) -> bool:
    """Whether the reduction calls functions of the user."""
    return bool(user_code(aggregation))


class Unpickler(ApartUnpickler):
    """Reads the graph of `SimulatedJob.pickled`."""

    def __init__(self, data: bytes, sink: Sink, constants: Sequence[object]) -> None:
        super().__init__(data)
        self._sink = sink
        self._constants = constants

    def persistent_load(self, name: Any) -> Any:
        return self._sink if name == "sink" else self._constants[name]
