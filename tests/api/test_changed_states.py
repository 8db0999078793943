"""A program resumes with states that it declares otherwise than before: converted, renamed, migrated, dropped, or refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    BroadcastProcessFunction,
    BroadcastState,
    ConfigError,
    DataStream,
    Environment,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ListState,
    MapState,
    ReducingState,
    SchemaError,
    StateTtl,
    TableState,
    ValueState,
    testing,
)
from midstream.engine.checkpoint.state_files import in_files, read_parts
from midstream.engine.core.errors import is_permanent
from midstream.inprocess.in_process_job import JobSnapshot

ROWS = [{"k": f"k{n % 5}", "n": n} for n in range(20)]
OUT = {"k": str, "n": int}


def stream(function: Any) -> DataStream:
    env = Environment("states")
    rows = env.from_collection(ROWS, schema={"k": str, "n": int}, splits=1).uid("rows")
    if isinstance(function, BroadcastProcessFunction):
        rules = env.from_collection(ROWS, schema={"k": str, "n": int}, splits=1).uid("rules")
        return rows.connect(rules.broadcast()).process(function, OUT).uid("f")
    keyed = rows.key_by("k")
    if isinstance(function, KeyedBatchFunction):
        return keyed.process_batches(function, OUT).uid("f")
    return keyed.process(function, OUT).uid("f")


def declared(base: type, **states: Any) -> Any:
    """A function with these states that ignores its rows."""
    made = type(
        "Changed", (base,), {"process": lambda self, row, ctx: None, "process_broadcast": lambda *_: None, **states}
    )
    return made()


def process_with(**states: Any) -> Any:
    return declared(KeyedProcessFunction, **states)


def tables_with(**states: Any) -> Any:
    return declared(KeyedBatchFunction, **states)


def stored(function: Any, *, parallelism: int = 2, rows: Any = ROWS) -> JobSnapshot:
    """What a function has stored of all rows, in several chunks."""
    with testing.job(stream(function), parallelism=parallelism) as job:
        source = {} if isinstance(function, BroadcastProcessFunction) else None
        half = len(rows) // 2
        for some in (rows[:half], rows[half:]):
            if source is None:
                job.feed("rows", some, cut="whole")
            else:
                job.feed("rules", some, cut="whole")
                job.feed("rows", some, cut="whole")
            snapshot = job.snapshot()
        return snapshot


def restored(
    function: Any, snapshot: JobSnapshot, *, parallelism: int = 3, allow_dropped_state: bool = False
) -> tuple[dict[str, Any], JobSnapshot]:
    """What the changed function has, and what it stores then; after another restore it has the same."""
    options: Any = {"parallelism": parallelism, "allow_dropped_state": allow_dropped_state}
    with testing.job(stream(function), restore=snapshot, **options) as job:
        found = job.state("f")
        again = job.snapshot()
        assert same(job.snapshot_and_restore(parallelism=2).state("f"), found)
    with testing.job(stream(function), restore=again, parallelism=1) as job:  # the new program alone
        assert same(job.state("f"), found)
    return found, again


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def plain(state: Any) -> Any:
        return state.sort(state.columns).rows() if isinstance(state, pl.DataFrame) else state

    return {name: plain(state) for name, state in one.items()} == {name: plain(state) for name, state in other.items()}


def refused(function: Any, snapshot: JobSnapshot, match: str, *, allow: bool = False) -> None:
    with pytest.raises(ConfigError, match=match):
        testing.job(stream(function), restore=snapshot, allow_dropped_state=allow)


@dataclass
class Inner:
    a: int
    note: str = "none"


@dataclass
class InnerBefore:
    a: int
    gone: float


class Before(KeyedProcessFunction):
    value = ValueState(pa.int32(), default=0)
    items = ListState(pa.float32())
    pages = MapState(key=pa.int8(), value=pa.int16())
    most = ReducingState(max, pa.uint8())
    price = ValueState(pa.decimal128(5, 2))
    inner = ListState(InnerBefore)
    untyped = ValueState()
    typed = ValueState(pa.int64())

    def process(self, row, ctx):
        n = row["n"]
        if n % 5 == 4 and n > 10:  # of the last key, nothing is left
            for state in (self.value, self.items, self.pages, self.most, self.price, self.inner, self.untyped):
                state.clear()
            return
        self.value.value += n
        self.items.append(n / 4)
        self.pages[n % 3] = n
        self.most.add(n)
        self.price.value = Decimal(n) / 4
        self.inner.append({"a": n, "gone": 0.5})
        self.untyped.value = {"n": n}
        self.typed.value = n


WIDER = {
    "value": ValueState(pa.int64(), default=0),
    "items": ListState(pa.float64()),
    "pages": MapState(key=pa.int64(), value=pa.float64()),
    "most": ReducingState(max, pa.int64()),
    "price": ValueState(pa.decimal128(12, 4)),
    "untyped": ValueState(),
    "typed": ValueState(pa.int64()),
}


@pytest.fixture(scope="module")
def before() -> tuple[JobSnapshot, dict[str, Any]]:
    snapshot = stored(Before())
    with testing.job(stream(Before()), restore=snapshot) as job:
        return snapshot, job.state("f")


def test_wider_types_and_other_fields_hold_what_was_stored(before: tuple[JobSnapshot, dict[str, Any]]) -> None:
    snapshot, then = before
    after = process_with(**WIDER, inner=ListState(Inner))
    refused(after, snapshot, r"list state 'inner' has what would be lost: field gone dropped\. .*--allow-dropped-state")
    now, again = restored(after, snapshot, allow_dropped_state=True)
    assert set(now["value"]) == {"k0", "k1", "k2", "k3"}
    for name in WIDER:
        assert now[name] == then[name], name
    assert now["inner"] == {k: [{"a": i["a"], "note": "none"} for i in items] for k, items in then["inner"].items()}
    refused(
        Before(),
        again,
        r"value state 'value' was int64, now it is int32; int64 cannot be converted to int32 without loss",
    )


def test_a_second_upgrade_follows_the_first_at_another_parallelism(before: tuple[JobSnapshot, dict[str, Any]]) -> None:
    snapshot, then = before
    kept = {**WIDER, "inner": ListState(InnerBefore)}
    _, first = restored(process_with(**kept), snapshot)
    second = kept | {
        "total": ValueState(pa.float64(), was="value", migrate=float),
        "most": ReducingState(max, float, migrate=float),
    }
    second.pop("value")
    now, _ = restored(process_with(**second), first, parallelism=4)
    assert now["total"] == then["value"] and all(type(value) is float for value in now["total"].values())
    assert now["most"] == then["most"] and all(type(value) is float for value in now["most"].values())


def test_a_key_of_a_map_is_widened_and_not_migrated(before: tuple[JobSnapshot, dict[str, Any]]) -> None:
    snapshot, _ = before
    others = {**WIDER, "inner": ListState(InnerBefore)}
    calls: list[int] = []
    pages = MapState(key=pa.int64(), value=pa.int16(), migrate=calls.append)
    restored(process_with(**{**others, "pages": pages}), snapshot)
    assert not calls
    text = MapState(key=str, value=pa.int16(), migrate=str)
    refused(
        process_with(**{**others, "pages": text}),
        snapshot,
        "keys int8 cannot be converted to large_string without loss",
    )
    pickled = MapState(value=pa.int16())
    refused(
        process_with(**{**others, "pages": pickled}), snapshot, "keys int8 cannot be converted to pickled by itself"
    )


def test_a_state_that_is_declared_no_more_is_dropped_if_that_is_allowed(
    before: tuple[JobSnapshot, dict[str, Any]],
) -> None:
    snapshot, then = before
    few = process_with(value=ValueState(pa.int32()), prices=ValueState(pa.decimal128(5, 2)), other=ListState(int))
    refused(
        few,
        snapshot,
        r"holds list state 'items' \(float\), which it does not have now\. Declare it as it was or, under",
    )
    price_alone = {
        name: state for name, state in (WIDER | {"inner": ListState(InnerBefore)}).items() if name != "price"
    }
    again = process_with(**price_alone, prices=ValueState(pa.decimal128(5, 2)))
    refused(
        again,
        snapshot,
        r"value state 'price' .* which it does not have now \(is it value state 'prices' now\?\)\. .*was='price'",
    )
    now, stored_now = restored(few, snapshot, allow_dropped_state=True)
    assert now == {"value": then["value"], "prices": {}, "other": {}}
    parts = {part.name for op in stored_now.metadata.operators for s in op.subtasks for part in s.parts}
    assert {name for name in parts if ":" in name} == {"value:value"}


# ---- names -----------------------------------------------------------------


def one(**states: Any) -> Any:
    """One state of many kinds, of each key."""

    class One(KeyedProcessFunction):
        def process(self, row, ctx):
            for name in states:
                state = getattr(self, name)
                if isinstance(state, ValueState):
                    state.value = row["n"]
                elif isinstance(state, MapState):
                    state["n"] = row["n"]
                elif isinstance(state, ListState):
                    state.append(row["n"])

    for name, state in states.items():
        setattr(One, name, state)
    return One()


def test_a_state_is_found_by_the_name_that_it_had_and_then_by_its_new_one() -> None:
    snapshot = stored(one(a=ValueState(int), m=MapState(key=str, value=int), l=ListState(int)))
    renamed = process_with(
        b=ValueState(int, was="a"), n=MapState(key=str, value=int, was="m"), o=ListState(float, was="l", migrate=float)
    )
    now, again = restored(renamed, snapshot)
    assert now["b"] == {f"k{n}": 15 + n for n in range(5)}
    assert now["n"]["k1"] == {"n": 16} and now["o"]["k1"] == [1.0, 6.0, 11.0, 16.0]
    restored(process_with(b=ValueState(int), n=MapState(key=str, value=int), o=ListState(float)), again)
    refused(
        one(a=ValueState(int)),
        again,
        r"holds value state 'b' \(int64\), which it does not have now\.",
    )


def test_a_checkpoint_that_has_both_names_has_two_states() -> None:
    snapshot = stored(one(a=ValueState(int), b=ValueState(pa.int32())))
    later = process_with(b=ValueState(int, was="a"))
    refused(later, snapshot, r"holds value state 'a' \(int64\), which it does not have now")
    now, _ = restored(later, snapshot, allow_dropped_state=True)
    assert now["b"]["k1"] == 16


def test_names_that_are_not_clear_are_refused_before_anything_runs() -> None:
    with pytest.raises(
        SchemaError, match=r"state 'b' has was='a', and so has 'c'|state 'c' has was='a', and so has 'b'"
    ):
        stream(process_with(b=ValueState(int, was="a"), c=ListState(int, was="a")))
    with pytest.raises(SchemaError, match=r"state 'b' has was='c', and 'c' is declared too: a state has one name"):
        stream(process_with(b=ValueState(int, was="c"), c=ValueState(int)))
    for wrong in (5, "", "a b", ["a"]):
        with pytest.raises(SchemaError, match="is not the name that an attribute had"):
            TableState({"k": str}, was=wrong)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="ListState: migrate='float' is not a function"):
        ListState(float, migrate="float")  # type: ignore[arg-type]


# ---- migrate ---------------------------------------------------------------


@dataclass
class Box:
    content: int


def boxes(**states: Any) -> Any:
    class Boxes(KeyedProcessFunction):
        box = ValueState()

        def process(self, row, ctx):
            self.box.value = Box(row["n"])

    return Boxes()


def content_of(box: object) -> bytes:
    assert isinstance(box, Box), box  # a class that values have must be one that the functions refer to
    return str(box.content).encode()


def test_untyped_values_become_typed_ones_and_back() -> None:
    snapshot = stored(boxes())
    text = ValueState(bytes, migrate=content_of)
    now, again = restored(process_with(box=text), snapshot)
    assert now["box"] == {f"k{n}": str(15 + n).encode() for n in range(5)}
    back, _ = restored(process_with(box=ValueState(migrate=lambda data: [data])), again)
    assert back["box"]["k0"] == [b"15"]
    refused(
        process_with(box=ValueState(bytes)),
        snapshot,
        r"was pickled, now it is large_binary; pickled cannot .* migrate=",
    )
    refused(
        process_with(box=ValueState()), again, r"was large_binary, now it is pickled; large_binary cannot .* migrate="
    )


def test_a_meaning_that_changes_without_its_type_has_a_new_name() -> None:
    snapshot = stored(one(seconds=ValueState(int)))
    same_name = process_with(seconds=ValueState(int, migrate=lambda s: s * 1000))
    assert restored(same_name, snapshot)[0]["seconds"]["k0"] == 15
    renamed = process_with(millis=ValueState(int, was="seconds", migrate=lambda s: s * 1000))
    assert restored(renamed, snapshot)[0]["millis"]["k0"] == 15_000


def failing(value: int) -> str:
    raise ValueError(f"no text of {value}")


def test_a_migration_that_fails_names_the_value() -> None:
    snapshot = stored(one(a=ValueState(int)))
    for migrate, match in (
        (float, r"state 'a': migrate\(1\d\) of key 'k\d' returned 1\d\.0, which does not fit: .*a float is not a str"),
        (lambda n: failing, r"state 'a': migrate\(1\d\) of key 'k\d' returned <function .*, which does not fit: "),
    ):
        kind = None if migrate is not float else str
        with pytest.raises(SchemaError, match=match) as caught:
            testing.job(stream(process_with(a=ValueState(kind, migrate=migrate))), restore=snapshot)
        assert is_permanent(caught.value)
    with pytest.raises(ValueError, match="no text of 1") as raised:  # a test gets what its function has raised
        testing.job(stream(process_with(a=ValueState(str, migrate=failing))), restore=snapshot)
    (note,) = raised.value.__notes__
    assert (
        "SchemaError: operator 'process': state 'a': migrate(15) of key 'k0' failed: ValueError: no text of 15" in note
    )


# ---- broadcast state -------------------------------------------------------


class RulesBefore(BroadcastProcessFunction):
    rules = BroadcastState(key=str, value=pa.int16())

    def process(self, row, ctx):
        return {"k": row["k"], "n": len(self.rules)}

    def process_broadcast(self, row, ctx):
        self.rules[row["k"]] = row["n"]


def test_broadcast_state_changes_too() -> None:
    snapshot = stored(RulesBefore())
    later = declared(BroadcastProcessFunction, known=BroadcastState(key=str, value=int, was="rules"))
    now, _ = restored(later, snapshot)
    assert now["known"] == {f"k{n}": 15 + n for n in range(5)}
    text = declared(BroadcastProcessFunction, rules=BroadcastState(key=str, value=str, migrate=str))
    assert restored(text, snapshot)[0]["rules"]["k0"] == "15"


# ---- tables ----------------------------------------------------------------


class TableBefore(KeyedBatchFunction):
    seen = TableState({"k": str, "n": pa.int32(), "gone": float, "parts": list[InnerBefore]})

    def process(self, rows, ctx):
        parts = pl.concat_list(pl.struct(pl.col("n").alias("a"), pl.lit(0.5).alias("gone")))
        self.seen.append(rows.select("k", n=pl.col("n").cast(pl.Int32), gone=pl.lit(1.5), parts=parts))


def test_a_table_gets_the_columns_that_are_declared() -> None:
    snapshot = stored(TableBefore())
    later = tables_with(known=TableState({"parts": list[Inner], "new": str, "n": int, "k": str}, was="seen"))
    refused(
        later,
        snapshot,
        r"table state 'known' has what would be lost: column parts\[\]\.gone dropped; column gone dropped",
    )
    now, again = restored(later, snapshot, allow_dropped_state=True)
    expected = [([{"a": n, "note": "none"}], None, n, f"k{n % 5}") for n in range(20)]
    assert sorted(now["known"].rows(), key=lambda row: row[2]) == expected
    refused(TableBefore(), again, "table state 'known'")
    narrow = tables_with(seen=TableState({"k": str, "n": pa.int16(), "gone": float, "parts": list[InnerBefore]}))
    refused(
        narrow, snapshot, "column n int32 cannot be converted to int16 without loss; convert the rows with migrate="
    )


@dataclass
class Seen:
    k: str
    n: float
    sure: bool = True


def test_new_columns_of_a_dataclass_have_its_defaults() -> None:
    now, _ = restored(tables_with(seen=TableState(Seen)), stored(TableBefore()), allow_dropped_state=True)
    assert sorted(now["seen"].rows(), key=lambda row: row[1])[3] == ("k3", 3.0, True)


def test_a_table_is_migrated_as_a_frame() -> None:
    snapshot = stored(TableBefore())
    counted = TableState({"k": str, "rows": pa.uint32()}, migrate=lambda old: old.group_by("k").agg(rows=pl.len()))
    now, _ = restored(tables_with(seen=counted), snapshot)
    assert sorted(now["seen"].rows()) == [(f"k{n}", 4) for n in range(5)]
    broken = tables_with(seen=TableState({"k": str}, migrate=lambda old: old.select("nothing")))
    with pytest.raises(pl.exceptions.ColumnNotFoundError) as raised:
        testing.job(stream(broken), restore=snapshot)
    (note,) = raised.value.__notes__
    assert "state 'seen': migrate, of 20 stored rows with the columns k, n, gone, parts, failed: Col" in note
    for migrate, match in (
        (lambda old: old.select("k"), "what migrate returned does not fit: state 'seen': column 'rows' is missing"),
        (
            lambda old: old.rows(),
            "what migrate returned does not fit: state 'seen' is a table: give it a polars DataFrame",
        ),
        (
            lambda old: old.select(pl.lit("other").alias("k"), rows=pl.col("n").cast(pl.UInt32)),
            "rows of keys that the table did not have",
        ),
        (
            lambda old: old.select(pl.lit(None, pl.String).alias("k"), rows=pl.col("n").cast(pl.UInt32)),
            "key column 'k' is null",
        ),
    ):
        changed = tables_with(seen=TableState({"k": str, "rows": pa.uint32()}, migrate=migrate))
        with pytest.raises(SchemaError, match=match):
            testing.job(stream(changed), restore=snapshot, parallelism=4)


def test_a_table_that_is_declared_no_more_is_dropped_if_that_is_allowed() -> None:
    snapshot = stored(TableBefore())
    other = tables_with(other=TableState({"k": str}))
    refused(other, snapshot, r"holds table state 'seen' \(k large_string, n int32, .*\), which it does not have now")
    assert restored(other, snapshot, allow_dropped_state=True)[0]["other"].height == 0


# ---- what the next checkpoint holds ----------------------------------------

GONE = 100
"""The first keys are removed again."""
MANY = [{"k": f"k{n}", "n": n} for n in range(20_000)]
REMOVING = [*MANY, *({"k": f"k{n}", "n": -1} for n in range(GONE))]


class Many(KeyedProcessFunction):
    a = ValueState(pa.int32())
    gone = ValueState(pa.int32())

    def process(self, row, ctx):
        if row["n"] < 0:
            self.a.clear()
            self.gone.clear()
        else:
            self.a.value = self.gone.value = row["n"]


class ManyWider(KeyedProcessFunction):
    a = ValueState(int)
    gone = ValueState(pa.int32())
    process = Many.process


def test_what_was_converted_is_stored_again_and_the_rest_is_not() -> None:
    """A checkpoint refers to files of older ones: none of those may have the old type."""
    snapshot = stored(Many(), rows=REMOVING)
    with testing.job(stream(ManyWider()), restore=snapshot, parallelism=2) as job:
        job.feed("rows", [{"k": "k700", "n": 70}])
        first = job.snapshot()
        job.feed("rows", [{"k": "k800", "n": 80}])
        second = job.snapshot()
    for then, now, refers in ((snapshot, first, False), (first, second, True)):
        assert bool(files(then, "value:a") & files(now, "value:a")) is refers
        assert files(then, "value:gone") & files(now, "value:gone")
        for subtask in now.metadata.operators[1].subtasks:
            types = {
                chunk.table.schema.field("value").type
                for part in read(now, subtask, "value:a")
                for chunk in part.chunks
            }
            assert types == {pa.int64()}
    with testing.job(stream(ManyWider()), restore=second, parallelism=3) as job:
        found = job.state("f")["a"]
        assert found == {row["k"]: row["n"] for row in MANY[GONE:]} | {"k700": 70, "k800": 80}


def files(snapshot: JobSnapshot, part: str) -> set[tuple[str, int]]:
    """The places in files of the chunks of a part."""
    operator = next(op for op in snapshot.metadata.operators if op.uid == "f")
    handles = [handle for subtask in operator.subtasks for handle in subtask.parts if handle.name == part]
    return {(chunk.file, chunk.offset) for chunk in in_files(handles).values()}


def read(snapshot: JobSnapshot, subtask: Any, part: str) -> list[Any]:
    handles = [handle for handle in subtask.parts if handle.name == part]
    return list(read_parts(snapshot.storage, handles, range(1 << 16), "test").values())


# ---- defaults, and classes of one's own ------------------------------------


@dataclass
class Odd:
    a: int
    at: int = field(default_factory=lambda: "no number")  # type: ignore[assignment]


@dataclass
class Nested:
    a: int
    inner: Inner = field(default_factory=lambda: Inner(3))
    many: list[int] = field(default_factory=list)


@dataclass
class Bare:
    a: int


class Bared(KeyedProcessFunction):
    bare = ValueState(Bare)

    def process(self, row, ctx):
        self.bare.value = {"a": row["n"]}


def test_a_default_is_that_of_the_dataclass_and_must_fit() -> None:
    snapshot = stored(Bared())
    now, _ = restored(process_with(bare=ValueState(Nested)), snapshot)
    assert now["bare"]["k2"] == {"a": 17, "inner": {"a": 3, "note": "none"}, "many": []}
    refused(
        process_with(bare=ValueState(Odd)), snapshot, "field at is new, and its default cannot be used: .*'no number'"
    )


class Version:
    """An own class, of which the next version of the program has another attribute."""


def test_objects_of_an_own_class_have_the_attributes_that_they_had() -> None:
    class Objects(KeyedProcessFunction):
        thing = ValueState()

        def process(self, row, ctx):
            if self.thing.value is None:
                self.thing.value = Box(row["n"])
            return {"k": ctx.key, "n": self.thing.value.content + getattr(self.thing.value, "more", 1000)}

    snapshot = stored(Objects(), rows=ROWS[:5])
    original = dict(Box.__annotations__)
    Box.more = 7  # type: ignore[attr-defined]  # as `more: int = 7` in the class does for objects without it
    try:
        with testing.job(stream(Objects()), restore=snapshot) as job:
            assert job.feed("rows", ROWS[:1]).take() == [{"k": "k0", "n": 7}]
            assert vars(job.state("f")["thing"]["k0"]) == {"content": 0}
    finally:
        del Box.more  # type: ignore[attr-defined]
        assert Box.__annotations__ == original


def test_what_expires_keeps_its_times_when_it_is_converted_renamed_and_migrated() -> None:
    ttl = StateTtl("1 h", by="clock")

    class Expiring(KeyedProcessFunction):
        value = ValueState(pa.int32(), default=0, ttl=ttl)
        items = ListState(pa.int16(), ttl=ttl)
        pages = MapState(key=pa.int8(), value=pa.int16(), ttl=ttl)
        most = ReducingState(max, pa.uint8(), ttl=ttl)

        def process(self, row, ctx):
            self.value.value = self.pages[row["n"]] = row["n"]
            self.items.append(row["n"])
            self.most.add(row["n"])

    changed = process_with(
        total=ValueState(pa.int64(), was="value", ttl=ttl),
        items=ListState(str, migrate=str, ttl=ttl),
        pages=MapState(key=int, value=float, ttl=ttl),
        most=ReducingState(max, int, ttl=ttl),
    )
    rows = ROWS[:2]
    with testing.job(stream(Expiring())) as job:
        job.feed("rows", rows)
        job.advance_processing_time("40 min")
        job.feed("rows", [{"k": "k1", "n": 7}])
        snapshot = job.snapshot()
    both = {
        "total": {"k0": 0, "k1": 7},
        "items": {"k0": ["0"], "k1": ["1", "7"]},
        "pages": {"k0": {0: 0.0}, "k1": {1: 1.0, 7: 7.0}},
        "most": {"k0": 0, "k1": 7},
    }
    for parallelism in (1, 3):
        with testing.job(stream(changed), restore=snapshot, parallelism=parallelism) as job:
            assert job.state("f") == both
            snapshot_of_new = job.snapshot()
            job.advance_processing_time("30 min")
            newest = {"total": {"k1": 7}, "items": {"k1": ["7"]}, "pages": {"k1": {7: 7.0}}, "most": {"k1": 7}}
            assert job.state("f") == newest
        with testing.job(stream(changed), restore=snapshot_of_new) as job:
            assert job.state("f") == both
