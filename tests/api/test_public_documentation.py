"""All that users call is documented: what it does, each parameter, the result, errors, and an example that is right.

What is public is found by walking: from the names that `midstream` and `midstream.testing` export, and the others of
the reference, over base classes, annotations and fields to every class of midstream that these name. An example with
prompts (`>>>`) is executed after the lines with which the reference begins. One without needs what a test does not have
(a broker, a database, Spark, a running job) or is a part of a user's class; it is only compiled.
"""

from __future__ import annotations

import ast
import contextlib
import doctest
import inspect
import io
import re
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

import midstream
from midstream import testing

REFERENCE = (Path(__file__).parents[2] / "docs" / "site" / "reference.rst").read_text(encoding="utf-8")
PARAMETERS = re.compile(r"(?:^|(?<=[.;] ))((?:`\w+`, )*`\w+`): ", re.MULTILINE)
RESULT = re.compile(r"(?:^|[.,;] )(?:by default )?returns?\b", re.MULTILINE | re.IGNORECASE)
BUGS = {"InvariantError", "NotImplementedError", "AssertionError"}
"""Errors that report a bug, and need not be expected."""

NOT_FOR_USERS = {
    "midstream's command line calls it": """
        midstream.api.environment.Environment.submission
        midstream.api.submit.StartOptions
        midstream.api.submit.Submission
        midstream.runtime.driver.job.Job.awaited
        midstream.engine.protocol.job_status.JobStatus.shortened
        """,
    "the operator calls it, not the function": """
        midstream.engine.state.declared_state.DeclaredState.part_name
        midstream.engine.state.declared_state.DeclaredState.bind
        midstream.engine.state.declared_state.DeclaredState.type_text
        midstream.engine.state.declared_state.DeclaredState.form
        midstream.engine.state.keyed_states.State.bound
        midstream.engine.state.keyed_states.State.snapshot
        midstream.engine.state.keyed_states.State.entries
        midstream.engine.state.keyed_states.State.columns_of
        midstream.engine.state.keyed_states.State.restore
        midstream.engine.state.keyed_states.State.forget
        midstream.engine.state.keyed_states.State.begin_row
        midstream.engine.state.keyed_states.State.roll_back
        midstream.engine.state.table_state.TableState.check_keys
        midstream.engine.state.table_state.TableState.held_runs
        midstream.engine.state.table_state.TableState.pop_until_tick
        midstream.engine.state.table_state.TableState.restore_upgraded
        midstream.engine.state.table_state.TableState.mark
        midstream.engine.state.table_state.TableState.stored_runs
        midstream.engine.state.table_state.TableState.roll_back
        midstream.engine.state.table_state.TableState.bound
        midstream.engine.state.table_state.TableState.snapshot
        midstream.engine.state.table_state.TableState.restore
        midstream.engine.state.changelog.Changelog
        """,
    "the driver starts and ends slots with it": """
        midstream.runtime.process.slot_provider.SlotProvider
        midstream.runtime.process.process_slots.ProcessSlots.check
        midstream.runtime.process.process_slots.ProcessSlots.pids
        midstream.runtime.process.process_slots.ProcessSlots.request
        midstream.runtime.process.process_slots.ProcessSlots.abandon
        midstream.runtime.process.process_slots.ProcessSlots.close
        """,
    "Spark calls it": """
        midstream.spark.state_source.StateSource.name
        midstream.spark.state_source.StateSource.schema
        midstream.spark.state_source.StateSource.reader
        """,
    "the connector's own rooms call it": """
        midstream.connectors.delta.delta_sink.DeltaSink.opened
        midstream.connectors.delta.delta_sink.DeltaSink.location
        midstream.connectors.delta.delta_sink.DeltaSink.at
        """,
    "it is only handed on, or looked at by the engine": """
        midstream.engine.state.safe_pickle.OwnCode
        midstream.engine.core.schemas.Default
        midstream.engine.checkpoint.metadata.CheckpointMetadata
        midstream.inprocess.virtual_loop.MemoryStorage
        midstream.testing.jobs.RunningJob.operators
        midstream.testing.simulation.causes.Diagnosis
        """,
}
REASONS = {name: reason for reason, names in NOT_FOR_USERS.items() for name in names.split()}


@dataclass(frozen=True)
class Public:
    """Something that users call, subclass, read or write."""

    name: str
    text: str
    call: Callable[..., Any] | None
    """What has parameters and a result; None for a property, and for a class that users do not create."""
    has_example: bool = True


def listed() -> dict[str, bool]:
    """The classes and functions of the reference, by full name, and whether users call them."""
    found, module = {}, ""
    for directive, name, is_not_called in re.findall(
        r"^\.\. (currentmodule|auto\w+):: ([\w.]+)(\(\))?$", REFERENCE, re.MULTILINE
    ):
        if directive == "currentmodule":
            module = name
        elif directive != "autodata":
            is_called = not is_not_called and directive != "autoexception"
            found[full_name(resolved(name if "." in name else f"{module}.{name}"))] = is_called
    return found


def resolved(name: str) -> Any:
    """The class or function of that full name, or the method or property."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute)
    except ModuleNotFoundError:
        return getattr(resolved(module), attribute)


def full_name(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"


def is_ours(value: Any) -> bool:
    return str(getattr(value, "__module__", "")).startswith("midstream.")


@cache
def names_of(module: str) -> dict[str, tuple[str, str]]:
    """What the names in a module's annotations mean, also of those that only a type checker imports."""
    tree = ast.parse(inspect.getsource(import_module(module)))
    found = {node.name: (module, node.name) for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {(alias.asname or alias.name): (node.module, alias.name) for alias in node.names}
    return found


def classes_in(annotation: object, module: str) -> Iterator[type]:
    for word in re.findall(r"\w+", str(annotation)):
        home, name = names_of(module).get(word, ("", ""))
        if home.startswith("midstream"):
            value = getattr(import_module(home), name)
            if inspect.isclass(value):
                yield value
            elif isinstance(value, str):  # an alias
                yield from classes_in(value, home)


def types_of(value: Any) -> Iterator[type]:
    """The classes of midstream that annotations name: those of a function, or of the public fields of a class."""
    for name, annotation in inspect.get_annotations(value).items():
        if not name.startswith("_"):
            yield from classes_in(annotation, value.__module__)


def function_of(value: Any) -> FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    value = inspect.unwrap(value) if callable(value) else value
    return value if isinstance(value, FunctionType) else None


def own_members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties of the class that none of its bases has: what overrides one is described there."""
    for name, value in vars(kind).items():
        is_first = not any(name in vars(base) for base in kind.__mro__[1:] if is_ours(base))
        if is_first and not name.startswith("_") and function_of(value) is not None:
            yield name, value


def walk() -> Iterator[Public]:
    called = listed()
    waiting = [resolved(name) for name in called]
    seen = set()
    while waiting:
        value = waiting.pop(0)
        name = full_name(value)
        if name in seen or name in REASONS or not is_ours(value) or value.__name__.startswith("_"):
            continue
        seen.add(name)
        text = inspect.cleandoc(value.__doc__ or "")
        if not inspect.isclass(value):
            waiting += types_of(inspect.unwrap(value))
            yield Public(name, text, value)
            continue
        bases = [base for base in value.__mro__ if is_ours(base) and full_name(base) not in REASONS]
        yield Public(name, text, value if called.get(name) else None)
        for base in bases:
            waiting += types_of(base)
            for member, definition in own_members(base):
                whole = f"{full_name(base)}.{member}"
                if whole in REASONS or whole in seen:
                    continue
                seen.add(whole)
                function = function_of(definition)
                assert function is not None
                waiting += types_of(function)
                is_property = isinstance(definition, property)
                doc = inspect.getdoc(getattr(base, member)) or ""
                yield Public(whole, doc, None if is_property else function, has_example=not is_property)


def examples(text: str) -> Iterator[str]:
    """The indented parts of a description."""
    for part in re.findall(r"(?:^    .*\n|^\n(?=    ))+", text + "\n", re.MULTILINE):
        if part.strip():
            yield textwrap.dedent(part).strip("\n") + "\n"


def lacking(public: Public) -> Iterator[str]:
    """What a description does not state."""
    text = public.text
    if not text.partition("\n\n")[0].rstrip().endswith((".", ":")):
        yield "a sentence of what it does"
    if public.has_example and not any(examples(text)):
        yield "an example"
    if public.call is None:
        return
    described = parameters_in(text)
    for method in re.findall(r"[Tt]he arguments are those of `([\w.]+)`", text):
        described |= parameters_in(inspect.getdoc(resolved(f"midstream.{method}")) or "")
    signature = inspect.signature(public.call)
    for name in signature.parameters:
        if name not in described | {"self"}:
            yield f"parameter {name}"
    if inspect.isclass(public.call):
        return
    if signature.return_annotation not in ("None", "NoReturn", None) and not RESULT.search(text):
        yield "what it returns"
    for error in raised(public.call):
        if error not in text and "Raises as" not in text:
            yield f"that it raises {error}"


def parameters_in(text: str) -> set[str]:
    return {name for names in PARAMETERS.findall(text) for name in re.findall(r"\w+", names)}


def raised(call: Callable[..., Any]) -> set[str]:
    """The errors that a function itself raises, as far as its text shows."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(call))))
    made = [node.exc for node in ast.walk(tree) if isinstance(node, ast.Raise)]
    names = {one.func.id for one in made if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)}
    return names - BUGS


@pytest.fixture(scope="module")
def public():
    return list(walk())


def test_all_that_is_exported_is_walked(public):
    exported = {
        full_name(getattr(module, name))
        for module in (midstream, testing)
        for name in module.__all__
        if callable(getattr(module, name))
    }
    assert exported - {one.name for one in public} == set()


def test_each_description_is_complete(public):
    found = {one.name: missing for one in public if (missing := list(lacking(one)))}
    assert found == {}, "\n".join(f"{name}: {', '.join(missing)}" for name, missing in found.items())


def test_each_class_that_users_meet_is_in_the_reference(public):
    classes = {one.name for one in public if inspect.isclass(resolved(one.name))}
    assert classes - listed().keys() == set()


def test_what_is_left_out_exists():
    for name in REASONS:
        assert resolved(name) is not None


def test_a_gap_in_a_description_is_found():
    def add(first: int, second: int) -> int:
        raise ValueError(f"{first} and {second} cannot be added")

    gaps = Public("add", "Add numbers.\n\n`first`: an integer.", add)
    assert list(lacking(gaps)) == ["an example", "parameter second", "what it returns", "that it raises ValueError"]
    whole = "Add numbers.\n\n`first`, `second`: integers.\n\nReturns their sum. Raises ValueError.\n\n    add(1, 2)"
    assert list(lacking(Public("add", whole, add))) == []


def test_each_example_is_right(public, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first_lines = re.search(r"^\.\. code-block:: python\n\n((?:    .*\n|\n)+)", REFERENCE, re.MULTILINE)
    assert first_lines is not None
    beginning = compile(textwrap.dedent(first_lines.group(1)), "reference.rst", "exec")
    executed = compiled = 0
    wrong = []
    for one in public:
        for example in examples(one.text):
            if not example.startswith(">>>"):
                compiled += 1
                compile(example, one.name, "exec")
                continue
            executed += 1
            names = {"__name__": "__main__"}
            exec(beginning, names)
            told = io.StringIO()
            with contextlib.redirect_stdout(io.StringIO()):
                runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
                case = doctest.DocTestParser().get_doctest(example, names, one.name, None, None)
                runner.run(case, out=told.write)
            if told.getvalue():
                wrong.append(told.getvalue())
    assert not wrong, "\n".join(wrong)
    assert executed > 100
    assert compiled > 50
