"""The next batch of an operator, shown on request: within bounds, whatever is in it, and only while it is asked for."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from decimal import Decimal
from typing import Any, cast

import msgspec
import pyarrow as pa
import pytest

from in_memory import NoRows
from midstream.engine.core.interfaces import Executor
from midstream.engine.graph.job_graph import OperatorSpec, SourceSpec, Vertex
from midstream.engine.operators.base import Operator
from midstream.engine.protocol.live_rows import (
    CHARS_MAX,
    COLUMNS_MAX,
    NAME_CHARS_MAX,
    ROWS_MAX,
    VALUE_CHARS_MAX,
    Column,
    RowSample,
    SampleRows,
)
from midstream.engine.worker.live_row_sample import row_sample, sample_next_batch
from midstream.engine.worker.operator_chain import OperatorChain, TaskOutputs
from standing_clock import StandingClock


def shown(columns: dict[str, pa.Array[Any]], rows: int = ROWS_MAX) -> RowSample:
    """As the driver gets it: checked against every bound of the message."""
    answer = row_sample(SampleRows(7, "op", None, rows), 3, pa.RecordBatch.from_pydict(columns))
    return msgspec.msgpack.decode(msgspec.msgpack.encode(answer), type=RowSample)


def test_values_are_text_with_the_types_of_columns() -> None:
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, 6)
    answer = shown(
        {
            "n": pa.array([1, None], pa.int64()),
            "s": pa.array(["a b", ""], pa.large_string()),
            "b": pa.array([b"\x00x", None], pa.large_binary()),
            "at": pa.array([at, at], pa.timestamp("us")),
            "d": pa.array([Decimal("1.50"), None], pa.decimal128(5, 2)),
            "l": pa.array([[1, None], []], pa.large_list(pa.int8())),
            "o": pa.array([{"x": 1.5}, None], pa.struct([("x", pa.float64())])),
        }
    )
    assert (answer.number, answer.subtask, answer.batch_rows, answer.columns_left_out) == (7, 3, 2, 0)
    assert answer.columns[:3] == (Column("n", "int64"), Column("s", "large_string"), Column("b", "large_binary"))
    assert answer.rows[0][:5] == ("1", "a b", "b'\\x00x'", "2026-01-02 03:04:05.000006", "1.50")
    assert answer.rows[0][5:] == ("[1, None]", "{'x': 1.5}")
    assert answer.rows[1] == (None, "", None, "2026-01-02 03:04:05.000006", None, "[]", None)


def test_only_so_many_rows_are_shown() -> None:
    numbers: dict[str, pa.Array[Any]] = {"n": pa.array(range(1000))}
    assert [row[0] for row in shown(numbers, 3).rows] == ["0", "1", "2"]
    assert shown(numbers, 3).batch_rows == 1000
    assert len(shown(numbers).rows) == ROWS_MAX


def test_long_values_names_and_types_are_shortened() -> None:
    text = "ä" * 10_000
    deep = pa.struct([(f"field_{n}", pa.int64()) for n in range(100)])
    answer = shown({text: pa.array([text]), "deep": pa.array([None], deep)})
    assert answer.rows[0][0] == "ä" * (VALUE_CHARS_MAX - 1) + "…"
    assert answer.columns[0].name == "ä" * (NAME_CHARS_MAX - 1) + "…" and len(answer.columns[1].type) == NAME_CHARS_MAX


def test_no_text_is_made_of_a_huge_value() -> None:
    answer = shown({"s": pa.array(["x" * 70_000], pa.large_string()), "l": pa.array([[1] * 20_000])})
    assert all(value is not None and value.endswith("bytes)") for value in answer.rows[0])


def test_wide_tables_and_many_long_values_are_cut() -> None:
    wide = shown({f"c{n}": pa.array(["x" * 150] * 60) for n in range(COLUMNS_MAX + 9)})
    assert len(wide.columns) == COLUMNS_MAX and wide.columns_left_out == 9
    assert len(wide.rows) == CHARS_MAX // (150 * COLUMNS_MAX)


def test_a_value_that_python_cannot_represent_is_shown_all_the_same() -> None:
    far = pa.array([2**62], pa.int64()).cast(pa.timestamp("s"), safe=False)
    day = pa.array([2**31 - 1], pa.int32()).cast(pa.date32())
    nested = pa.StructArray.from_arrays([far], ["at"])
    for value in shown({"far": far, "day": day, "nested": nested}).rows[0]:
        assert value is not None and any(character.isdigit() for character in value), value


class _Passes(Operator):
    def open(self, context: Any, out: Any) -> None:
        self.out = out

    def process(self, batch: pa.RecordBatch, port: int) -> None:
        self.out.emit(batch)
        self.out.emit(batch.slice(0, 1), "side")


class _Nowhere:
    def emit(self, batch: pa.RecordBatch, tag: str | None) -> None: ...

    def has_reader(self, tag: str) -> bool:
        return True


class World:
    """A source and two operators in a chain."""

    def __init__(self) -> None:
        operators = [_Passes(), _Passes()]
        self.chain = OperatorChain(operators, cast(TaskOutputs, _Nowhere()), StandingClock())
        for at, operator in enumerate(operators):
            operator.open(None, self.chain.outputs[at + 1])
        specs = tuple(OperatorSpec(uid, uid, operator) for uid, operator in zip("ab", operators, strict=True))
        self.vertex = Vertex(0, 1, SourceSpec("source", "source", NoRows()), specs)
        self.timers: list[Callable[[], None]] = []
        self.answers: list[RowSample] = []

    def call_later(self, delay_s: float, mail: Callable[[], None]) -> None:
        self.timers.append(mail)

    def ask(self, operator: str, number: int = 0, side_output: str | None = None) -> None:
        asked = SampleRows(number, operator, side_output, 5)
        sample_next_batch(asked, 0, self.vertex, self.chain, cast(Executor, self), self.answers.append)

    def emit(self, rows: int) -> None:
        self.chain.outputs[0].emit(pa.RecordBatch.from_pydict({"n": list(range(rows))}))

    @property
    def is_watched(self) -> bool:
        return any(output.tap is not None for output in self.chain.outputs)


@pytest.mark.parametrize("operator", ["source", "a", "b"])
def test_the_next_batch_is_shown_once(operator: str) -> None:
    world = World()
    world.emit(2)
    world.ask(operator)
    assert world.answers == []
    world.emit(3)
    world.emit(4)
    (answer,) = world.answers
    assert answer.batch_rows == 3 and not world.is_watched


def test_of_a_side_output_its_own_rows_are_shown() -> None:
    world = World()
    world.ask("b", side_output="side")
    world.emit(3)
    (answer,) = world.answers
    assert answer.batch_rows == 1


def test_it_ends_after_a_while_or_with_the_next_who_asks() -> None:
    world = World()
    world.ask("a", 0)
    world.ask("a", 1)
    world.timers[0]()
    assert world.is_watched, "the time of the one before is over, not that of this one"
    world.timers[1]()
    assert not world.is_watched
    world.ask("b", 2)
    world.emit(1)
    assert [answer.number for answer in world.answers] == [2]
    world.timers[2]()
    world.ask("of another task", 3)
    assert not world.is_watched and len(world.timers) == 3
