"""Pickles of values that have no Arrow type: the Python objects that states, accumulators and data sources store.

A pickle is a program: its writer can make its reader call anything. The pickles written and read here can only make
plain values and instances of the job's own classes. They refer to classes by name: the code of a class is that of the
job that reads, and never comes from a checkpoint. Writing and reading follow one rule, so a value that could not be
read back is refused when it is written.

A job's own classes are those that it ships (`OwnCode`). Other packages are called only if the job names them.
"""

from __future__ import annotations

import builtins
import copyreg
import importlib
import io
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import BuiltinFunctionType, FunctionType
from typing import Any
from zoneinfo import ZoneInfo

from midstream.engine.core.errors import JobError, StorageError
from midstream.engine.state import pickle_makers, pickled_arrays
from midstream.engine.state.pickle_instructions import check_instructions

_MAIN = "__main__"
_LOADED = "__midstream__"
"""The name of the module that `midstream run` creates from a job's file."""

_PLAIN = {
    "array": "array",
    "builtins": "Ellipsis NotImplemented bool bytearray bytes complex dict float frozenset int list object range set "
    "slice str tuple",
    "collections": "ChainMap Counter OrderedDict defaultdict deque",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "ipaddress": "IPv4Address IPv4Interface IPv4Network IPv6Address IPv6Interface IPv6Network",
    pickle_makers.__name__: " ".join(pickle_makers.MAKERS),
    pickled_arrays.__name__: " ".join(pickled_arrays.MAKERS),
    "pyspark.sql.datasource": "InputPartition WriterCommitMessage",
    "pyspark.sql.datasource_internal": "SimpleInputPartition",
    "types": "SimpleNamespace",
    "uuid": "SafeUUID UUID",
    "zoneinfo": "ZoneInfo",
}
_CALL_ANYTHING = {"builtins", "_operator", "operator", "functools", "_functools"}
"""Trusting one of these modules would mean trusting everything."""
_PLAIN_NAMES = {(module, name) for module, names in _PLAIN.items() for name in names.split()} | {
    ("builtins", name)
    for name, item in vars(builtins).items()
    if isinstance(item, type) and issubclass(item, BaseException)
}


@dataclass(frozen=True)
class OwnCode:
    """The code that a job ships: `classes` by value, and `packages` (top-level names) that slots import.

    `trusted`: other packages from which a pickle may call anything.
    """

    classes: tuple[type, ...] = ()
    packages: frozenset[str] = frozenset()
    trusted: frozenset[str] = frozenset()
    named: Mapping[tuple[str, str], type | None] = field(init=False, repr=False, compare=False)
    """`classes` by module and qualified name; None if two of them share it."""

    def __post_init__(self) -> None:
        named: dict[tuple[str, str], type | None] = {}
        for each in self.classes:
            name = _name_of(each)
            named[name] = each if named.get(name, each) is each else None
        object.__setattr__(self, "named", named)

    def __reduce__(self) -> tuple[type[OwnCode], tuple[object, ...]]:
        return OwnCode, (self.classes, self.packages, self.trusted)


class Pickles:
    """Writes and reads values as restricted pickles."""

    def __init__(self, own: OwnCode) -> None:
        self._own = own
        self._found: dict[tuple[str, str], Any] = {}
        """What `find` has returned."""

    def __reduce__(self) -> tuple[type[Pickles], tuple[OwnCode]]:
        return Pickles, (self._own,)

    def dumps(self, value: Any, what: str) -> bytes:
        """Pickle a value. Raises JobError if it could not be read back. Any thread."""
        kind = type(value)
        if kind is int or kind is str or kind is float or kind is bool or kind is bytes or value is None:
            # These types need no check: the result is the same bytes, in a fifth of the time.
            return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        buffer = io.BytesIO()
        writer = _Writer(buffer, self)
        try:
            writer.dump(value)
        except _Refused as refused:
            raise JobError(f"{what}: {refused}") from None
        except Exception as error:  # any __reduce__ may raise anything
            raise JobError(f"{what} cannot be pickled: {type(error).__name__}: {error}") from error
        data = buffer.getvalue()
        if not writer.named <= _PLAIN_NAMES:
            # Some values can be written and not read back: all of some classes, and some of others, such as those
            # with a cycle through a set. A checkpoint with such a value could never be restored.
            try:
                self.loads(data, what)
            except StorageError as error:
                raise JobError(f"{error}; the value is not stored") from error
        return data

    def loads(self, data: bytes, what: str) -> Any:
        """Unpickle a value. Raises StorageError for what the rule refuses, and for data that is not a pickle. Any
        thread.
        """
        try:
            has_lookups = check_instructions(data)
        except (ValueError, IndexError) as error:
            raise StorageError(f"{what}: {error}: it is damaged, or midstream has not written it") from None
        try:
            if not has_lookups:
                return pickle.loads(data)
            try:
                return _Reader(io.BytesIO(data), self).load()
            except _NeverCalled:
                return _SlowReader(io.BytesIO(data), self).load()
        except _Refused as refused:
            raise StorageError(f"{what}: {refused}") from None
        except Exception as error:  # damaged pickles may raise anything, and so may the job's classes
            raise StorageError(f"{what} cannot be read back: {type(error).__name__}: {error}") from error

    def is_shipped(self, name: tuple[str, str]) -> bool:
        return name in self._own.named

    def find(self, module: str, name: str) -> Any:
        """Return what a pickle may refer to by this name. Raises _Refused."""
        try:
            return self._found[module, name]
        except KeyError:
            found = self._found[module, name] = self._find(module, name)
            return found

    def _find(self, module: str, name: str) -> Any:
        module = _MAIN if module == _LOADED else module
        if (module, name) in _PLAIN_NAMES:
            return _attribute(module, name)
        if self.is_shipped((module, name)):
            shipped = self._own.named[module, name]
            if shipped is None:
                raise _Refused(f"the job has two classes {module}.{name}; rename one of them")
            return shipped
        package = module.partition(".")[0]
        if package in self._own.packages:
            item = _attribute(module, name)
            if isinstance(item, type) and _name_of(item) == (module, name):  # not a class that the module imports
                return item
        elif package in self._own.trusted:
            item = _attribute(module, name)
            if (getattr(item, "__module__", None) or "").partition(".")[0] == package:
                return item
        raise _Refused(self._refusal(module, name))

    def _refusal(self, module: str, name: str) -> str:
        package = module.partition(".")[0]
        if module == _MAIN or package in self._own.packages or any(module == own for own, _ in self._own.named):
            return (
                f"{module}.{name} is not a class at the top level of a module that the operator's functions refer to; "
                "a checkpoint holds plain values and instances of such classes, never code"
            )
        if package in _CALL_ANYTHING:
            return (
                f"{module}.{name} is none of the plain types that a checkpoint may hold: methods, functions and types "
                "with parameters are not stored, not even by the __reduce__ of a class, or in an attribute as "
                "Box[int]() sets it (write Box())"
            )
        return (
            f"{module}.{name} is neither the job's own nor one of the plain types that a checkpoint may hold. Store "
            f"plain values, or instances of classes of your own; or give Environment(trusted_packages=[{package!r}]): "
            "but then anyone with write access to the checkpoint directory can have everything in that package called"
        )

    def check(self, item: object, module: str, name: str) -> tuple[str, str]:
        """Check that `find` returns exactly this item for the name. Raises _Refused."""
        if self.find(module, name) is not item:
            raise _Refused(f"{module}.{name} is not the class of that name that the job was started with")
        return module, name


class _Refused(Exception):
    pass


class _Writer(pickle.Pickler):
    def __init__(self, buffer: io.BytesIO, rule: Pickles) -> None:
        super().__init__(buffer, pickle.HIGHEST_PROTOCOL)
        self._rule = rule
        self.named: set[tuple[str, str]] = set()
        """Classes and functions to which the pickle refers."""

    def reducer_override(self, item: Any) -> Any:
        """Called by pickle for everything except numbers, strings, bytes, lists, tuples, dicts and sets."""
        kind = type(item)
        if isinstance(item, type) or kind is FunctionType or kind is BuiltinFunctionType:
            if item is _shipped:
                return NotImplemented
            name = self._rule.check(item, *_name_of(item))
            self.named.add(name)
            return (_shipped, name) if self._rule.is_shipped(name) else NotImplemented
        if isinstance(item, Enum):
            return kind, (item.value,)  # some versions of Python would write getattr(kind, name)
        if kind is ZoneInfo and item.key is not None:
            return kind, (item.key,)
        made = pickle_makers.reduced(item)
        if made is not None:
            return made
        reduced = self._reduced(item, kind)
        if isinstance(reduced, tuple) and len(reduced) > 2 and reduced[2] is not None:
            if len(reduced) < 6 or reduced[5] is None:  # else the item has a function of its own for this
                lists_and_dicts = (*reduced[3:5], None, None)[:2]
                reduced = (*reduced[:3], *lists_and_dicts, pickle_makers.set_state)
        if isinstance(reduced, str):  # pickle would write whatever has this name without a further check
            module = pickle.whichmodule(item, reduced)  # type: ignore[attr-defined]
            self.named.add(self._rule.check(item, module, reduced))
        return reduced

    def _reduced(self, item: Any, kind: type) -> Any:
        """Return the reduction that pickle itself would use."""
        registered = copyreg.dispatch_table.get(kind)
        return item.__reduce_ex__(pickle.HIGHEST_PROTOCOL) if registered is None else registered(item)


class _NeverCalled(Exception):
    """A pickle refers to one of the types that no pickle may call."""


class _Reader(pickle.Unpickler):
    """The reader in C, which calls whatever type it is given."""

    def __init__(self, buffer: io.BytesIO, rule: Pickles) -> None:
        super().__init__(buffer)
        self._rule = rule

    def find_class(self, module: str, name: str) -> Any:
        if name == "_shipped" and module == __name__:
            return self._rule.find
        found = self._rule.find(module, name)
        if isinstance(found, type) and found in pickle_makers.NEVER_CALLED:
            raise _NeverCalled
        return found


_Python: Any = pickle._Unpickler  # the same reader in Python


def _checked(code: int, called: int) -> Callable[[Any], None]:
    """Return the instruction that calls the item at this position of the stack, if that is allowed."""
    call: Callable[[Any], None] = _Python.dispatch[code]

    def checked(reader: Any) -> None:
        kind = reader.stack[called]
        if isinstance(kind, type) and kind in pickle_makers.NEVER_CALLED:
            raise _Refused(f"the pickle calls {kind.__name__}, which is never written")
        call(reader)

    return checked


class _SlowReader(_Python):  # type: ignore[misc,no-any-unimported]  # of the type Any
    """Reads values that refer to types which they may not call, such as the factory of a defaultdict."""

    dispatch = {
        **_Python.dispatch,
        pickle.REDUCE[0]: _checked(pickle.REDUCE[0], -2),
        pickle.NEWOBJ[0]: _checked(pickle.NEWOBJ[0], -2),
        pickle.NEWOBJ_EX[0]: _checked(pickle.NEWOBJ_EX[0], -3),
    }

    def __init__(self, buffer: io.BytesIO, rule: Pickles) -> None:
        super().__init__(buffer)
        self._rule = rule

    def find_class(self, module: str, name: str) -> Any:
        return self._rule.find if (module, name) == (__name__, "_shipped") else self._rule.find(module, name)


def _shipped(module: str, name: str) -> type:
    """Stand in for the reader's `find` in pickles. It finds a class that the job ships by value, since no slot could
    import it.
    """
    raise AssertionError("a reader has its own")


def _name_of(item: Any) -> tuple[str, str]:
    module = item.__module__ or _MAIN
    return _MAIN if module == _LOADED else module, item.__qualname__


def _attribute(module: str, name: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found
