"""Finds reasons in the source code of users' functions why their results may differ from one run to another."""

from __future__ import annotations

import ast
import linecache
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from types import CodeType, FunctionType
from typing import Final

from midstream.engine.graph.logical_graph import LogicalGraph, Node
from midstream.inprocess.own_modules import by_value, methods_of, own_modules, user_code


class Habit(Enum):
    ATTRIBUTE = "keeps state in an attribute of the function object"
    GLOBAL = "keeps state in a global variable"
    CLOSURE = "keeps state in a variable of an enclosing function"
    DEFAULT = "keeps state in a mutable default argument"
    CLOCK = "reads the clock"
    REAL_CLOCK = "reads the clock in a way that cannot be simulated"
    RANDOM = "draws random numbers"
    UNSIMULATED = "draws random numbers that cannot be simulated"
    HASH = "calls hash(), which differs between processes for strings"
    SET = "uses a set, whose order of iteration differs between processes for strings"
    EFFECT = "changes the world outside of the job"
    TIMER = "sets an event-time timer"
    WATERMARK = "reads the watermark"


MISTAKES: Final = tuple(habit for habit in Habit if habit not in (Habit.TIMER, Habit.WATERMARK))
"""The habits that may be mistakes by themselves."""

UNDECLARED: Final = (Habit.ATTRIBUTE, Habit.GLOBAL, Habit.CLOSURE, Habit.DEFAULT)
_CHANGING: Final = frozenset(
    [
        "add",
        "append",
        "appendleft",
        "clear",
        "discard",
        "extend",
        "extendleft",
        "insert",
        "pop",
        "popitem",
        "popleft",
        "remove",
        "setdefault",
        "update",
        "subtract",
        "sort",
        "reverse",
    ]
)
_OPENING: Final = frozenset(("__init__", "open", "__post_init__", "__new__", "__setstate__"))
_CLOCKS: Final = frozenset(("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "now", "utcnow", "today"))
_TIME_NOW: Final = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}
"""Functions of the module `time` that read the clock when they are called with this number of arguments."""
_CLOCK_OWNERS: Final = frozenset(("time", "datetime", "date", "dt"))
_DRAWS: Final = frozenset(
    [
        "random",
        "randint",
        "randrange",
        "choice",
        "choices",
        "shuffle",
        "sample",
        "uniform",
        "gauss",
        "normalvariate",
        "expovariate",
        "betavariate",
        "getrandbits",
        "triangular",
        "normal",
        "rand",
        "randn",
        "integers",
    ]
)
_UNSIMULATED: Final = frozenset(
    ("uuid4", "uuid1", "urandom", "token_hex", "token_bytes", "token_urlsafe", "default_rng")
)
_EFFECTS: Final = frozenset(("write_text", "write_bytes", "urlopen", "unlink", "mkdir", "Popen"))


@dataclass(frozen=True, slots=True)
class Clue:
    habit: Habit
    file: str
    line: int
    text: str
    """The line itself."""

    def __str__(self) -> str:
        return f"{os.path.relpath(self.file)}:{self.line}: {self.habit.value}: {self.text}"


def clues_of(node: Node, logical: LogicalGraph) -> list[Clue]:
    """Return clues in the functions of one operator, and in those that they call."""
    if node.operator is None or node.sink is not None:
        return []
    with by_value(own_modules(logical)):
        return clues_in(user_code(node.operator, brought_along=False))


def clues_in(code: Iterable[FunctionType | type]) -> list[Clue]:
    functions: dict[CodeType, FunctionType] = {}
    declared: dict[CodeType, set[str]] = {}
    for item in code:
        if isinstance(item, FunctionType):  # or a method, which is pickled as a separate function
            functions.setdefault(item.__code__, item)
            continue
        for method in methods_of(item):
            functions.setdefault(method.__code__, method)
        names = _declared(item)
        for base in item.__mro__:  # a method of a base class uses the states that this class declares
            for method in methods_of(base):
                declared.setdefault(method.__code__, set()).update(names)
    found: dict[Clue, None] = {}
    for function in functions.values():
        found.update(dict.fromkeys(_of_function(function, frozenset(declared.get(function.__code__, ())))))
    return list(found)


def _declared(owner: type) -> set[str]:
    """Return the names of the states that the class declares, itself or in a base."""
    return {
        name
        for base in owner.__mro__
        for name, value in vars(base).items()
        if any(kind.__module__.startswith("midstream.") for kind in type(value).__mro__)
    }


def _of_function(function: FunctionType, declared: frozenset[str]) -> Iterator[Clue]:
    code = function.__code__
    for node in _trees(code.co_filename, code.co_firstlineno):
        yield from _FunctionExaminer(function, node, declared).clues()


def _trees(file: str, line: int) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]:
    """Return the functions that begin in that line."""
    lines = linecache.getlines(file)
    if not lines:
        return []
    try:
        tree = ast.parse("".join(lines))
    except SyntaxError:  # the file was changed while it was loaded
        return []
    found: list[ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda] = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if line in (first, node.lineno):
                found.append(node)
        elif isinstance(node, ast.Lambda) and node.lineno == line:
            found.append(node)
    return found


class _FunctionExaminer:
    """Examines one function."""

    def __init__(
        self,
        function: FunctionType,
        tree: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda,
        declared: frozenset[str],
    ) -> None:
        self._file = function.__code__.co_filename
        self._tree = tree
        self._declared = declared
        """The names of declared state in the class."""
        self._is_opening = getattr(tree, "name", "") in _OPENING
        arguments = [*tree.args.posonlyargs, *tree.args.args]
        self._contexts = {a.arg for a in arguments[1:]}
        """Names that may be the context of a process function: its last argument, in any method to which it is passed
        on.
        """
        self._self = arguments[0].arg if arguments and arguments[0].arg == "self" else None
        defaults = dict(zip([a.arg for a in arguments[::-1]], tree.args.defaults[::-1], strict=False))
        defaults |= {a.arg: d for a, d in zip(tree.args.kwonlyargs, tree.args.kw_defaults, strict=True) if d}
        self._defaults = {
            name for name, value in defaults.items() if isinstance(value, (ast.List, ast.Dict, ast.Set, ast.Call))
        }
        self._captured = set(function.__code__.co_freevars)
        self._local = {a.arg for a in (*arguments, *tree.args.kwonlyargs)}
        self._outer: dict[str, Habit] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Global):
                self._outer.update(dict.fromkeys(node.names, Habit.GLOBAL))
            elif isinstance(node, ast.Nonlocal):
                self._outer.update(dict.fromkeys(node.names, Habit.CLOSURE))
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id not in self._outer:
                self._local.add(node.id)

    def clues(self) -> Iterator[Clue]:
        body = self._tree.body if isinstance(self._tree.body, list) else [self._tree.body]
        for statement in body:
            for node in ast.walk(statement):
                for habit in self._habits(node):
                    yield self._clue(habit, node)

    def _clue(self, habit: Habit, node: ast.AST) -> Clue:
        line: int = node.lineno  # type: ignore[attr-defined]
        return Clue(habit, self._file, line, linecache.getline(self._file, line).strip())

    def _habits(self, node: ast.AST) -> Iterator[Habit]:
        if isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                yield from self._assigned(target)
        elif isinstance(node, ast.Call):
            yield from self._called(node)
        elif isinstance(node, (ast.Set, ast.SetComp)):
            yield Habit.SET
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in self._contexts:
            if node.attr == "now":
                yield Habit.CLOCK
            elif node.attr == "watermark":
                yield Habit.WATERMARK

    def _assigned(self, target: ast.expr) -> Iterator[Habit]:
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                yield from self._assigned(each)
        elif isinstance(target, ast.Name) and target.id in self._outer:
            yield self._outer[target.id]
        elif isinstance(target, ast.Attribute) and not self._is_opening:
            if self._is_self(target.value):
                yield Habit.ATTRIBUTE
            elif isinstance(target.value, ast.Name):
                yield from self._changed(target.value)
        elif isinstance(target, ast.Subscript):
            yield from self._changed(target.value)

    def _changed(self, thing: ast.expr) -> Iterator[Habit]:
        """Yield habits for an object that is reached through a name and changed in place."""
        if isinstance(thing, ast.Subscript):
            yield from self._changed(thing.value)
        elif isinstance(thing, ast.Attribute) and self._is_self(thing.value):
            if thing.attr not in self._declared and not self._is_opening:
                yield Habit.ATTRIBUTE
        elif isinstance(thing, ast.Name):
            if thing.id in self._defaults:
                yield Habit.DEFAULT
            elif thing.id in self._captured:
                yield Habit.CLOSURE
            elif thing.id not in self._local:
                yield Habit.GLOBAL

    def _called(self, call: ast.Call) -> Iterator[Habit]:  # noqa: PLR0912 - one arm for each kind of node
        function = call.func
        if isinstance(function, ast.Name):
            name = function.id
            if name in _TIME_NOW and name not in self._local and _TIME_NOW[name] == len(call.args):
                yield Habit.CLOCK
            elif name == "datetime64" and _is_present(call):
                yield Habit.REAL_CLOCK
            elif name == "hash":
                yield Habit.HASH
            elif name in ("set", "frozenset"):
                yield Habit.SET
            elif name == "next":
                for argument in call.args[:1]:
                    yield from self._changed(argument)
            elif name == "open" and _is_writing(call):
                yield Habit.EFFECT
            elif name in _UNSIMULATED:
                yield Habit.UNSIMULATED
            elif name in ("time_ns", "perf_counter", "monotonic", "time") and name not in self._local:
                yield Habit.CLOCK
            elif name in ("randint", "randrange", "shuffle", "getrandbits", "uniform"):
                yield Habit.RANDOM
        elif isinstance(function, ast.Attribute):
            owner = _last(function.value)
            if (function.attr in _CLOCKS and owner in _CLOCK_OWNERS) or (
                owner == "time" and _TIME_NOW.get(function.attr) == len(call.args)
            ):
                yield Habit.CLOCK
            elif function.attr == "datetime64" and _is_present(call):
                yield Habit.REAL_CLOCK
            elif function.attr == "event_time" and owner == "timers":
                yield Habit.TIMER
            elif function.attr in _DRAWS and owner == "random":
                yield Habit.RANDOM
            elif function.attr in _UNSIMULATED or (function.attr == "Random" and not call.args):
                yield Habit.UNSIMULATED
            elif function.attr in _EFFECTS or (function.attr == "open" and _is_writing(call)):
                yield Habit.EFFECT
            elif function.attr in _CHANGING:
                yield from self._changed(function.value)

    def _is_self(self, node: ast.expr) -> bool:
        return self._self is not None and isinstance(node, ast.Name) and node.id == self._self


def _last(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_present(call: ast.Call) -> bool:
    """Whether the call returns the current time: datetime64("now"), datetime64("today")."""
    return any(isinstance(a, ast.Constant) and a.value in ("now", "today") for a in call.args)


def _is_writing(call: ast.Call) -> bool:
    modes = [a.value for a in (*call.args, *(k.value for k in call.keywords)) if isinstance(a, ast.Constant)]
    return any(isinstance(mode, str) and len(mode) <= 3 and not {"w", "a", "x", "+"}.isdisjoint(mode) for mode in modes)
