"""Pickles of untyped values: whatever is written can be read, nothing else is, and no code comes out of them."""

from __future__ import annotations

import array
import collections
import contextlib
import enum
import functools
import io
import ipaddress
import os
import pickle
import pickletools
import subprocess
import sys
import tracemalloc
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from fractions import Fraction
from typing import Any, Generic, NamedTuple, TypeVar
from zoneinfo import ZoneInfo

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream.engine.core.errors import JobError, StorageError
from midstream.engine.operators.functions.process_functions import KeyedProcessFunction
from midstream.engine.state import pickled_arrays
from midstream.engine.state.job_code import own_code
from midstream.engine.state.pickle_instructions import DEPTH_MAX, check_instructions
from midstream.engine.state.safe_pickle import OwnCode, Pickles, _Writer

T = TypeVar("T")


class Color(enum.Enum):
    RED = "r"
    PAIR = (1, 2)


class Flags(enum.Flag):
    A = 1
    B = 2


@dataclass
class Price:
    amount: Any
    color: Color = Color.RED
    tags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ChangelogSnapshot:
    n: int


@dataclass(frozen=True)
class Unreadable:
    __slots__ = ("n",)  # pickle sets it by setattr, which a frozen class refuses
    n: int


class Sentinel:
    """Written by name, as pandas.NA is."""

    def __reduce__(self) -> str:
        return "MISSING"


MISSING = Sentinel()


class Known(enum.Enum):
    """Of which one member equals nothing that is read."""

    YES = 1
    UNKNOWN = object()


class Point(NamedTuple):
    x: int
    y: int


class Names(list):
    pass


class Wrong(Exception):
    def __init__(self, row: int, why: str) -> None:
        super().__init__(row, why)
        self.row = row


class Box(Generic[T]):
    pass


class Outer:
    class Inner:
        def __eq__(self, other: object) -> bool:
            return type(other) is type(self)

        def __hash__(self) -> int:
            return 0


OWN = (Color, Flags, Price, ChangelogSnapshot, Unreadable, Sentinel, Known, Point, Names, Wrong, Outer, Outer.Inner)
BY_VALUE = Pickles(OwnCode(classes=OWN))
BY_NAME = Pickles(OwnCode(packages=frozenset({__name__.partition(".")[0]})))


def round_trip(pickles: Pickles, value: Any) -> Any:
    return pickles.loads(pickles.dumps(value, "state 'n'"), "state 'n'")


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
    st.text(),
    st.binary(),
    st.complex_numbers(allow_nan=False),
    st.dates(),
    st.times(),
    st.datetimes(timezones=st.sampled_from([None, UTC, ZoneInfo("America/New_York")])),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.fractions(),
    st.uuids(),
    st.ip_addresses(),
    st.sampled_from([Color.RED, Color.PAIR, Flags.A | Flags.B, Outer.Inner(), Outer.Inner, int, list]),
    st.builds(ChangelogSnapshot, st.integers()),
    st.builds(Point, st.integers(), st.integers()),
    st.builds(np.float64, st.floats(allow_nan=False)),
    st.builds(np.datetime64, st.datetimes()),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(Names),
        st.lists(inner, max_size=4).map(collections.deque),
        st.dictionaries(st.text(max_size=3), inner, max_size=4),
        st.dictionaries(st.text(max_size=3), inner, max_size=4).map(collections.OrderedDict),
        st.builds(Price, inner, st.sampled_from(Color), st.lists(st.text(max_size=3), max_size=2)),
    ),
    max_leaves=12,
)


@given(VALUES, st.sampled_from([BY_VALUE, BY_NAME]))
@settings(max_examples=examples(100))
def test_what_is_written_comes_back_as_it_was(value: Any, pickles: Pickles) -> None:
    found = round_trip(pickles, value)
    assert found == value and type(found) is type(value)
    assert repr(found) == repr(value) or "object at" in repr(value)


class Calls:
    """Pickles as a call of anything."""

    def __init__(self, what: Callable[..., Any], *arguments: Any) -> None:
        self.call = what, arguments

    def __reduce__(self) -> Any:
        return self.call


ARRAYS = [
    np.asfortranarray(np.arange(6).reshape(2, 3)),
    np.arange(10)[::2],
    np.array(5),
    np.zeros((0, 3)),
    np.array([[1, "x"]], object),
    np.array(["2020-01-01", "NaT"], "M8[D]"),
    np.array([1, 2], ">i4"),
    np.zeros((2, 2), "V0"),
    np.zeros(1, [("a", "i4")])[0],
    np.timedelta64(3, "s"),
    np.float16(1),
    np.str_("x"),
    np.longdouble(1) / 3,
    np.dtype([("a", "i4")]),
]


@pytest.mark.parametrize("value", ARRAYS, ids=lambda value: type(value).__name__)
def test_arrays_and_numbers_of_every_kind_come_back(value: Any) -> None:
    found = round_trip(BY_VALUE, value)
    assert repr(found) == repr(value) and type(found) is type(value)
    if isinstance(value, np.ndarray):
        assert found.dtype == value.dtype and found.shape == value.shape and found.flags.writeable
        found[...] = value  # its memory is its own


@pytest.mark.parametrize(
    "value",
    [np.ma.masked_array([1, 2], [0, 1]), np.rec.array([(1, 2)]), np.zeros(1, [("a", "O")]), np.add, np.float64],  # type: ignore[arg-type,call-overload]  # odd on purpose
    ids=lambda value: type(value).__name__,
)
def test_arrays_with_references_and_other_kinds_of_arrays_are_refused(value: Any) -> None:
    with pytest.raises(JobError, match="state 'n'"):
        BY_VALUE.dumps(value, "state 'n'")


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(np.arange(3)),
        pickle.dumps(Calls(np.ndarray, (1,), "O", b"\0" * 8)),
        pickle.dumps(Calls(pickled_arrays.array, "O", (1,), b"\0" * 8, "C")),
        pickle.dumps(Calls(pickled_arrays.array, [("a", "O")], (1,), b"\0" * 8, "C")),
        pickle.dumps(Calls(pickled_arrays.array, "f8", (10**12,), b"\0" * 8, "C")),
        pickle.dumps(Calls(pickled_arrays.array, "f8", (-1, -1), b"\0" * 8, "C")),
        pickle.dumps(Calls(pickled_arrays.scalar, "V8", b"1")),
        pickle.dumps(Calls(pickled_arrays.objects, (10**9,), [])),
        pickle.dumps(Calls(pickled_arrays.dtype, "O")),
    ],
)
def test_a_crafted_array_takes_no_memory_that_is_not_its_own(data: bytes) -> None:
    with pytest.raises(StorageError, match="state 'n'"):
        BY_VALUE.loads(data, "state 'n'")


@pytest.mark.parametrize(
    "value",
    [
        np.arange(6).reshape(2, 3),
        np.array(["a", None, [1]], object),
        np.zeros(2, [("a", "i4"), ("b", "S3")]),
        collections.Counter("aab"),
        collections.defaultdict(list, {1: [2]}),
        collections.defaultdict(Price),  # type: ignore[arg-type]  # odd on purpose
        array.array("d", [1.5]),
        ipaddress.ip_network("10.0.0.0/8"),
        types.SimpleNamespace(a=[1]),
        uuid.UUID(int=7),
        range(3),
        ...,
        bytearray(b"x"),
        Fraction(1, 3),
        Decimal("NaN"),
        [date(1, 1, 1), time(1, tzinfo=timezone(timedelta(hours=2))), datetime.max],
    ],
)
def test_plain_containers_and_arrays_come_back(value: Any) -> None:
    found = round_trip(BY_VALUE, value)
    assert repr(found) == repr(value) and type(found) is type(value)


@given(st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary())
def test_values_that_need_no_check_are_written_as_if_checked(value: Any) -> None:
    buffer = io.BytesIO()
    _Writer(buffer, Pickles(OwnCode())).dump(value)
    assert Pickles(OwnCode()).dumps(value, "here") == buffer.getvalue()


@pytest.mark.parametrize("value", [b"x" * 300_000, "é" * 300_000, 1 << 300_000], ids=["bytes", "str", "int"])
def test_large_values_that_need_no_question_come_back(value: Any) -> None:
    pickles = Pickles(OwnCode())
    found = pickles.loads(pickles.dumps(value, "here"), "here")
    assert type(found) is type(value) and found == value


def test_exceptions_come_back() -> None:
    found = round_trip(BY_VALUE, [Wrong(3, "why"), ValueError("x"), KeyError(1)])
    assert [type(error) for error in found] == [Wrong, ValueError, KeyError]
    assert found[0].row == 3 and found[0].args == (3, "why")


def test_two_references_to_one_object_stay_one() -> None:
    price = Price(1)
    first, second = round_trip(BY_VALUE, [price, price])
    assert first is second


def a_local_class() -> Any:
    class Local:
        pass

    return Local()


@pytest.mark.parametrize(
    "value",
    [
        os.system,
        subprocess.Popen,
        eval,
        getattr,
        lambda: 1,
        Price(1).__repr__,
        Price.__init__,
        a_local_class(),
        [{"deep": a_local_class()}],
        np.random.default_rng(0),
        sys.stdout,
        (n for n in "ab"),
        Unreadable(1),
        [Price(Unreadable(1))],
        MISSING,
        np.add,
        np.random.default_rng,  # compiled by Cython: of a type of its own
        [Calls(np.random.default_rng, 1)],  # as pandas' times are written
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("pickles", [BY_VALUE, BY_NAME])
def test_what_could_not_be_read_back_is_refused_when_it_is_written(value: Any, pickles: Pickles) -> None:
    with pytest.raises(JobError, match="state 'n'"):
        pickles.dumps(value, "state 'n'")


def test_each_value_is_read_back_not_only_the_first_of_its_class() -> None:
    for pickles in (BY_VALUE, BY_NAME):
        assert round_trip(pickles, Known.YES) is Known.YES
        with pytest.raises(JobError, match=r"state 'n' cannot be read back: .*Known; the value is not stored"):
            pickles.dumps([Known.UNKNOWN], "state 'n'")


def text(value: str) -> bytes:
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    return text(module) + text(name) + b"\x93"


def dotted(module: str, name: str) -> bytes:
    return b"\x80\x04" + named(module, name) + b"."


MINE = __name__


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(Calls(os.system, "exit 1")),
        pickle.dumps(Calls(eval, "1 + 1")),
        pickle.dumps(Calls(getattr, 1, "real")),
        pickle.dumps(Calls(subprocess.Popen, ["false"])),
        pickle.dumps(print),
        b"cos\nsystem\n(S'exit 1'\ntR.",
        cloudpickle.dumps(lambda: 1),
        cloudpickle.dumps(a_local_class()),
        dotted("__main__", "Price.__init__.__globals__"),
        dotted(MINE, "Price.__init__.__globals__"),
        dotted(MINE, "Price.__init__"),
        dotted(MINE, "os.system"),
        dotted(MINE, "subprocess.Popen"),
        dotted(MINE, "a_local_class"),
        dotted("midstream.engine.state.safe_pickle", "_attribute"),
        dotted("midstream.engine.state.safe_pickle", "importlib.import_module"),
        dotted("numpy", "ndarray.tofile"),
        dotted("builtins", "object.__subclasses__"),
        dotted("no_such_module", "Price"),
    ],
)
@pytest.mark.parametrize("pickles", [BY_VALUE, BY_NAME])
def test_a_crafted_pickle_calls_nothing(data: bytes, pickles: Pickles) -> None:
    with pytest.raises(StorageError, match=r"state 'n': .*"):
        pickles.loads(data, "state 'n'")


def allowed(data: bytes) -> bool | None:
    """Whether the pickle may look something up; None if it has an instruction that is not allowed."""
    try:
        return check_instructions(data)
    except ValueError:
        return None


ARGUMENTS = {
    "K": b"x",
    "h": b"x",
    "\x80": b"\x05",
    "M": b"xx",
    "J": b"x" * 4,
    "j": b"x" * 4,
    "G": b"x" * 8,
    "\x95": bytes(8),
}
COUNTED = {"\x8c": 1, "C": 1, "\x8a": 1, "X": 4, "B": 4, "\x8b": 4, "\x8d": 8, "\x8e": 8, "\x96": 8}


def test_an_instruction_that_is_allowed_makes_plain_values_and_sets_no_state() -> None:
    """Only one instruction may look up by name, and none may put a value at a position of its choice."""
    found = set()
    for op in pickletools.opcodes:
        width = COUNTED.get(op.code)
        argument = ARGUMENTS.get(op.code, b"") if width is None else (3).to_bytes(width, "little") + b"abc"
        if allowed(op.code.encode("latin-1") + argument + b".") is not None:
            found.add(op.name)
    assert {op.name for op in pickletools.opcodes} - found == {
        *("BUILD", "INST", "OBJ", "GLOBAL", "PERSID", "BINPERSID", "EXT1", "EXT2", "EXT4"),
        *("PUT", "BINPUT", "LONG_BINPUT", "GET", "DUP", "POP_MARK", "LIST", "DICT", "NEXT_BUFFER", "READONLY_BUFFER"),
        *("INT", "LONG", "FLOAT", "STRING", "BINSTRING", "SHORT_BINSTRING", "UNICODE"),
    }


NO_PICKLE = (
    pickle.UnpicklingError,
    EOFError,
    ValueError,
    TypeError,
    KeyError,
    IndexError,
    AttributeError,
    OverflowError,
    MemoryError,
)


@given(st.binary(max_size=60))
@settings(max_examples=examples(500))
def test_what_is_read_without_a_lookup_has_none(data: bytes) -> None:
    class Asked(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            pytest.fail(f"{module}.{name} is looked up")

        def persistent_load(self, name: Any) -> Any:
            pytest.fail(f"{name} is looked up")

    for given_data in (data, b"\x80\x05" + data + b"."):
        if allowed(given_data) is False:
            with contextlib.suppress(*NO_PICKLE):
                Asked(io.BytesIO(given_data)).load()


@given(st.lists(st.sampled_from(pickletools.opcodes), max_size=12), st.binary(min_size=60, max_size=60))
@settings(max_examples=examples(500))
def test_what_is_allowed_is_what_pickletools_reads(ops: list[Any], arguments: bytes) -> None:
    """No instruction hides in the arguments of another, or after a length."""
    data = b"".join(op.code.encode("latin-1") + arguments[5 * at : 5 * at + 5] for at, op in enumerate(ops)) + b"."
    if allowed(data) is not None:
        read = set()
        with contextlib.suppress(ValueError):  # instructions of numbers alone are not checked
            for op, _, _ in pickletools.genops(data):
                read.add(op.name)
        assert not {"BUILD", "PUT", "BINPUT", "LONG_BINPUT", "GLOBAL", "INST", "OBJ"} & read


SET_STATE = named("midstream.engine.state.pickle_makers", "set_state")


def sets_state(made: bytes, state: bytes) -> bytes:
    return b"\x80\x05" + SET_STATE + made + state + b"\x86R."


ATTRIBUTE = b"N}" + text("RATE") + b"K\x63s\x86"
"""As pickle writes what is in slots: it is set with setattr."""


@pytest.mark.parametrize("state", [b"}" + text("RATE") + b"K\x63s", ATTRIBUTE])
@pytest.mark.parametrize(
    "made",
    [
        named(MINE, "Price"),
        named("collections", "OrderedDict"),
        named("uuid", "UUID"),
        named("midstream.engine.state.pickle_makers", "counter"),
        named("midstream.engine.state.pickled_arrays", "array"),
        named("midstream.engine.state.safe_pickle", "_shipped"),
        named(MINE, "Color") + text("r") + b"\x85R",
        b"K\x07",
        b")",
    ],
)
@pytest.mark.parametrize("how", ["set_state", "BUILD"])
def test_a_pickle_changes_nothing_of_the_process(how: str, made: bytes, state: bytes) -> None:
    data = sets_state(made, state) if how == "set_state" else b"\x80\x05" + made + state + b"b."
    before = {name: dict(vars(each)) for name, each in (("class", Price), ("enum", Color.RED), ("uuid", uuid.UUID))}
    with pytest.raises(StorageError, match="state 'n'"):
        BY_NAME.loads(data, "state 'n'")
    assert before == {
        name: dict(vars(each)) for name, each in (("class", Price), ("enum", Color.RED), ("uuid", uuid.UUID))
    }


HUGE = named("builtins", "range") + b"J\xff\xff\xff\x7f\x85R"


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x05\x8fr\x00\x00\x00\x20.",
        b"\x80\x05Np1000000000\n.",
        b"\x80\x05\x8e" + (1 << 40).to_bytes(8, "little") + b".",
        b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b".",
        b"\x80\x05\x8e" + (1 << 28).to_bytes(8, "little") + b".",
        b"\x80\x05\x96" + (1 << 28).to_bytes(8, "little") + b".",
        b"\x80\x05B" + (1 << 28).to_bytes(4, "little") + b".",
        b"\x80\x05\x8b\xff\xff\xff\x7f.",
        b"\x80\x05\x95" + (1 << 40).to_bytes(8, "little") + b"N.",
        b"\x80\x05}" + b")" + b"\x85" * 10**5 + b"Ns.",  # the hash of such a tuple overflows the C stack
        b"\x80\x05}" + b")" + b"N\x86" * 10**5 + b"Ns.",
        b"\x80\x05}" + b"(\x91" + b"\x85(h\x00\x91" * 10**5 + b"Ns.",
        *(b"\x80\x05" + named("builtins", name) + HUGE + b"\x85R." for name in ("list", "set", "frozenset", "tuple")),
        *(
            b"\x80\x05" + named("builtins", name) + HUGE + b"\x85\x81."
            for name in ("list", "set", "frozenset", "tuple")
        ),
        *(b"\x80\x05" + named("collections", name) + HUGE + b"\x85R." for name in ("deque", "Counter")),
        *(b"\x80\x05" + named("builtins", name) + b"J\xff\xff\xff\x7f\x85R." for name in ("bytes", "bytearray")),
        b"\x80\x05" + named("midstream.engine.state.pickle_makers", "deque") + HUGE + b"\x85R.",
        b"\x80\x05" + named("midstream.engine.state.pickle_makers", "counter") + HUGE + b"\x85R.",
        b"\x80\x05" + named("builtins", "int") + named("decimal", "Decimal") + text("1e999999999") + b"\x85R\x85R.",
        b"\x80\x05" + named("fractions", "Fraction") + text("1e999999999") + b"\x85R.",
        b"\x80\x05" + named("array", "array") + text("d") + HUGE + b"\x86R.",
    ],
    ids=lambda data: repr(data[:40]),
)
def test_a_pickle_takes_no_memory_or_time_that_its_bytes_do_not_account_for(data: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match="state 'n'"):
            BY_NAME.loads(data, "state 'n'")
        assert tracemalloc.get_traced_memory()[1] < 100 * len(data) + 10**6
    finally:
        tracemalloc.stop()


def test_tuples_within_each_other_are_read_up_to_a_depth() -> None:
    deep: tuple[Any, ...] = ()
    for _ in range(500):
        deep = (deep,)
    wide = {(n, (n,)): n for n in range(DEPTH_MAX)}
    assert round_trip(BY_NAME, [deep, {deep: 1}]) == [deep, {deep: 1}]
    assert round_trip(BY_NAME, wide) == wide


@given(st.binary(max_size=60), st.integers(0, 200))
@settings(max_examples=examples(100))
def test_damaged_pickles_are_storage_errors_or_values(data: bytes, at: int) -> None:
    whole = BY_VALUE.dumps(Price([1, "x"]), "state 'n'")
    for damaged in (data, whole[: at % len(whole)]):
        with contextlib.suppress(StorageError):  # and nothing else
            BY_VALUE.loads(damaged, "state 'n'")


def test_the_refusal_names_the_class_and_the_way_to_allow_it() -> None:
    value = np.random.default_rng(0)
    with pytest.raises(JobError, match=r"numpy\.random\..*trusted_packages=\['numpy'\]"):
        BY_VALUE.dumps(value, "state 'n'")
    trusting = Pickles(OwnCode(trusted=frozenset({"numpy"})))
    assert round_trip(trusting, value).random() == value.random()
    with pytest.raises(StorageError, match="os"):
        trusting.loads(dotted("numpy", "os.system"), "state 'n'")


@pytest.mark.parametrize(
    "value", [Price(1).__repr__, functools.partial(int, "1"), Box[int]()], ids=lambda value: type(value).__name__
)
def test_to_trust_what_can_call_anything_is_not_suggested(value: Any) -> None:
    with pytest.raises(JobError, match="methods, functions and types with parameters are not stored") as caught:
        BY_NAME.dumps(value, "state 'n'")
    assert "trusted_packages" not in str(caught.value)


def test_a_class_is_that_of_the_job_that_reads() -> None:
    """As after an upgrade: the values of the class of then are of the class of now."""

    def price(**methods: Any) -> type:
        return type("Money", (), {"__module__": "__main__", "__eq__": lambda a, b: a.n == b.n, **methods})

    then, now = price(), price(shown=lambda self: f"{self.n} EUR")
    value = then()
    value.n = 3
    data = Pickles(OwnCode((then,))).dumps(value, "state 'n'")
    found = Pickles(OwnCode((now,))).loads(data, "state 'n'")
    assert type(found) is now and found.shown() == "3 EUR"  # type: ignore[attr-defined]  # odd on purpose
    assert len(data) < 160, "no code"
    with pytest.raises(StorageError, match=r"__main__\.Money is not a class"):
        Pickles(OwnCode()).loads(data, "state 'n'")


def test_a_jobs_file_is_the_same_module_however_it_is_run() -> None:
    def visit(module: str) -> type:
        return type("Visit", (), {"__module__": module})

    loaded, program = visit("__midstream__"), visit("__main__")
    data = Pickles(OwnCode((loaded,))).dumps(loaded(), "state 'n'")
    assert type(Pickles(OwnCode((program,))).loads(data, "state 'n'")) is program
    back = Pickles(OwnCode((program,))).dumps(program(), "state 'n'")
    assert type(Pickles(OwnCode((loaded,))).loads(back, "state 'n'")) is loaded


def test_two_classes_of_one_name_are_refused() -> None:
    one, other = (type("Visit", (), {"__module__": "__main__"}) for _ in range(2))
    with pytest.raises(JobError, match=r"two classes __main__\.Visit"):
        Pickles(OwnCode((one, other))).dumps(one(), "state 'n'")
    with pytest.raises(JobError, match="is not the class of that name"):
        Pickles(OwnCode((one,))).dumps(other(), "state 'n'")


# ---- whose code it is ----


@pytest.mark.parametrize("name", ["__main__", "__midstream__"])
def test_of_two_classes_of_one_name_the_one_that_the_name_means_is_shipped(name: str) -> None:
    """A dataclass with slots is a second class, and the first is still there in its methods."""
    source = """
from dataclasses import dataclass
class Outer:
    @dataclass(frozen=True, slots=True)
    class Key:
        n: int
class Visits:
    def process(self, row): return Outer.Key(1)
"""
    module = types.ModuleType(name)
    exec(compile(source, "job.py", "exec", dont_inherit=True), module.__dict__)
    found = own_code(module.__dict__["Visits"]())
    value = module.__dict__["Outer"].Key(3)
    assert round_trip(Pickles(found), {value: value}) == {value: value}


class Visits(KeyedProcessFunction):
    def process(self, row: Any, ctx: Any) -> Any:
        return [{"price": Price(1)}]


def test_what_a_job_refers_to_by_name_is_its_own_if_it_is_not_installed() -> None:
    shipped = [Visits(), lambda: (np.zeros(1), pickle.dumps, collections.OrderedDict)]
    found = own_code(shipped)
    assert found.packages == {__name__.partition(".")[0]}
    assert own_code(shipped, ["pages"]).packages == found.packages | {"pages"}
    assert found.classes == ()


def test_what_travels_by_value_is_its_own_also_through_other_functions() -> None:
    source = """
class Deep: pass
class Price:
    class Cents: pass
def helper(): return Deep()
class Visits:
    def process(self, row): return Price(), helper()
"""
    module = types.ModuleType("__main__")
    exec(source, module.__dict__)
    found = own_code(module.__dict__["Visits"]())
    assert {each.__qualname__ for each in found.classes} == {"Visits", "Price", "Price.Cents", "Deep"}
    shipped: OwnCode = pickle.loads(cloudpickle.dumps(found))
    deep = pickle.loads(cloudpickle.dumps(module.__dict__["Deep"]))
    data = Pickles(found).dumps(module.__dict__["Deep"](), "state 'n'")
    assert type(Pickles(shipped).loads(data, "state 'n'")) is deep
