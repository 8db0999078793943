"""The house rules of src/midstream, read from the syntax trees: who may import whom, and what protocol code never does."""

from __future__ import annotations

import ast
import builtins
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from machine import limit_s

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "midstream"
LABORATORY = ROOT / "lab" / "midstream_lab"

PACKAGES = ("engine", "connectors", "runtime", "spark", "inprocess", "page", "api", "simulation", "testing", "cli")
"""Low to high: a package imports only packages before it."""

SUBPACKAGES = {
    "engine": ("core", "state", "operators", "graph", "protocol", "checkpoint", "exchange", "worker", "coordinator"),
    "engine.operators": ("windows", "functions"),
    "engine.coordinator": ("restore", "placement", "checkpoints", "requests"),
    "connectors": ("common", "memory", "files", "formats", "kafka", "postgres", "delta", "iceberg", "lookup"),
    "runtime": ("storage", "network", "process", "driver"),
    "testing": ("simulation",),
    "cli": ("commands",),
}
"""Within a package, low to high. Files of the package itself that import one of them lie above them all, the others below."""

PURE_PACKAGE = "engine"
"""Pure steps: time, chance, threads and the outside world reach them through engine.core.interfaces alone."""

OUTSIDE_MODULES = {
    "asyncio",
    "concurrent.futures",
    "glob",
    "multiprocessing",
    "numpy.random",
    "pathlib",
    "pyarrow.fs",
    "queue",
    "random",
    "secrets",
    "select",
    "selectors",
    "shutil",
    "signal",
    "socket",
    "ssl",
    "subprocess",
    "tempfile",
    "threading",
    "time",
    "uuid",
}
OUTSIDE_CALLS = {
    "open",
    "io.open",
    "os.open",
    "os.urandom",
    "os.getrandom",
    "os.remove",
    "os.listdir",
    "os.makedirs",
    "pa.OSFile",
    "pa.memory_map",
    "np.random.default_rng",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "datetime.datetime.now",
    "date.today",
}


@dataclass(frozen=True)
class Import:
    module: str
    """Full dotted name; for `from a import b` it is a.b."""
    line: int
    lazy: bool
    """Inside a function: it happens when that is called, not when the module is imported."""
    typing: bool
    """Under `if TYPE_CHECKING:`: it never happens."""


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def all_files() -> list[Path]:
    """With those of the laboratory."""
    return [*files(), *sorted(LABORATORY.rglob("*.py"))]


def name_of(file: Path) -> str:
    return str(file.relative_to(SOURCE if file.is_relative_to(SOURCE) else ROOT))


def package_of(file: Path) -> str | None:
    parts = file.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), str(file))


@cache
def imports_of(file: Path) -> tuple[Import, ...]:
    package = ("midstream", *file.relative_to(SOURCE).parts[:-1]) if file.is_relative_to(SOURCE) else ()
    return tuple(_imports(tree_of(file), package, lazy=False, typing=False))


def _imports(node: ast.AST, package: tuple[str, ...], lazy: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(alias.name, child.lineno, lazy, typing)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else ()
            module = ".".join([*base, *([child.module] if child.module else [])])
            for alias in child.names:
                yield Import(f"{module}.{alias.name}", child.lineno, lazy, typing)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, package, lazy or inside, typing or for_types)


def package_imported(module: str) -> str | None:
    """The package that importing `module` enters; what the package itself exports comes from `api`."""
    head, *rest = module.split(".")
    if head != "midstream":
        return None
    return rest[0] if rest and rest[0] in PACKAGES else "api"


def test_every_folder_is_a_room_with_a_docstring_that_says_what_it_owns():
    folders = {file.parent for file in files() if file.parent != SOURCE}
    packages = {folder.relative_to(SOURCE).parts[0] for folder in folders}
    assert packages <= set(PACKAGES), f"no place among the layers for {sorted(packages - set(PACKAGES))}"
    for folder in sorted(folders):
        init = folder / "__init__.py"
        assert init.exists(), f"{folder.relative_to(SOURCE)} has no __init__.py"
        docstring = ast.get_docstring(tree_of(init)) or ""
        assert len(docstring) > 20, f"{name_of(init)}: say what the package owns, imports, and on which thread it runs"


def _imports_from_above(file: Path) -> Iterator[str]:
    package = package_of(file)
    if package is None:
        return
    for found in imports_of(file):
        target = package_imported(found.module)
        if target is None or target == package:
            continue
        if PACKAGES.index(target) >= PACKAGES.index(package):
            yield f"{name_of(file)}:{found.line}: {package!r} imports {found.module}, but {target!r} lies above it"
        if package == "simulation" and target == "spark":
            yield f"{name_of(file)}:{found.line}: the simulator needs no JVM"


def test_rooms_import_only_rooms_below_them():
    assert [offence for file in files() for offence in _imports_from_above(file)] == []


def subpackage_of(module: str, package: str) -> str | None:
    """The subpackage of `package`, a dotted path below `midstream`, in which a module lies that is given likewise."""
    part = module.removeprefix(f"{package}.").split(".")[0] if module.startswith(f"{package}.") else None
    return part if part in SUBPACKAGES[package] else None


def imports_within(file: Path, package: str) -> Iterator[tuple[Import, str]]:
    """What a file imports of its own package, as dotted paths below `midstream`, but for names of types."""
    for found in imports_of(file):
        if found.module.startswith(f"midstream.{package}.") and not found.typing:
            yield found, found.module.removeprefix("midstream.")


def _imports_from_later_subpackages(package: str) -> Iterator[str]:
    order, folder, tops = SUBPACKAGES[package], SOURCE.joinpath(*package.split(".")), set()
    for file in folder.glob("*.py"):
        if any(subpackage_of(path, package) for _, path in imports_within(file, package)):
            tops.add(file.stem)
    for index, name in enumerate(order):
        for file in sorted((folder / name).rglob("*.py")):
            for found, path in imports_within(file, package):
                target = subpackage_of(path, package)
                own = path.removeprefix(f"{package}.").split(".")[0]
                is_below = own not in tops if target is None else order.index(target) <= index
                if not is_below:
                    yield f"{name_of(file)}:{found.line}: {name!r} imports {found.module}, which lies above it"


@pytest.mark.parametrize("package", SUBPACKAGES)
def test_subpackages_import_only_subpackages_before_them(package):
    folder = SOURCE.joinpath(*package.split("."))
    folders = {each.name for each in folder.iterdir() if each.is_dir() and each.name != "__pycache__"}
    assert folders == set(SUBPACKAGES[package]), (
        f"no place in {package} for {sorted(folders ^ set(SUBPACKAGES[package]))}"
    )
    assert list(_imports_from_later_subpackages(package)) == []


def test_the_product_does_not_import_the_laboratory():
    offences = [
        f"{name_of(file)}:{found.line}: imports {found.module}, which no user has"
        for file in files()
        for found in imports_of(file)
        if found.module.split(".")[0] == "midstream_lab"
    ]
    assert offences == []


def _imports_of_spark(file: Path) -> Iterator[str]:
    if package_of(file) == "spark":
        return
    for found in imports_of(file):
        if found.typing:
            continue
        if found.module.split(".")[0] in {"pyspark", "py4j"}:
            yield f"{name_of(file)}:{found.line}: {found.module}"
        if package_imported(found.module) == "spark" and not found.lazy:
            yield f"{name_of(file)}:{found.line}: import midstream.spark where it is used, not on top"


def test_only_the_spark_room_knows_pyspark():
    assert [offence for file in files() for offence in _imports_of_spark(file)] == []


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _reaches_outside(file: Path) -> Iterator[str]:
    for found in imports_of(file):
        parents = {found.module.rsplit(".", n)[0] for n in range(found.module.count(".") + 1)}
        for outside in parents & OUTSIDE_MODULES:
            yield f"{name_of(file)}:{found.line}: imports {outside}; use midstream.engine.core.interfaces"
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.Call) and (called := _dotted(node.func)) in OUTSIDE_CALLS:
            yield f"{name_of(file)}:{node.lineno}: calls {called}(); use core.interfaces"


def test_protocol_code_reaches_the_outside_only_through_interfaces():
    protocol = [file for file in files() if package_of(file) == PURE_PACKAGE]
    assert [offence for file in protocol for offence in _reaches_outside(file)] == []


LINES_MAX = 580
"""A file is one idea; past some 500 lines look for the second one. Docstrings are not counted: those of what users call
are long, since they have all parameters and an example.
"""

FUNCTION_LINES_MAX = 60
"""Its docstring not counted."""
LONG_FUNCTIONS = {
    "engine/coordinator/notifications.py subscribe": "one table, whose order is the point",
    "lab/midstream_lab/simulate.py simulate": "what is printed of a campaign, line by line",
    "lab/midstream_lab/scenarios/scenario.py draw": "one field of the scenario after the other, in the order in which they are drawn",
    "cli/commands/doctor.py _check_settings": "one setting of Spark after the other",
    "lab/midstream_lab/jobs/topologies.py _operator": "one arm for each kind of operator",
}
ATTRIBUTES_MAX = 20
LARGE_CLASSES = {
    "engine/worker/task.py Task": "the parts of a subtask, its state, and what is measured of its steps",
    "lab/midstream_lab/jobs/recorded_rows.py SimSource": "each of them is drawn by scenarios",
    "engine/operators/async_map.py AsyncMapOperator": "the life of a row from its call to its result",
    "engine/operators/windows/window_aggregation.py WindowAggregation": "what is computed of the aggregates, once each",
    "engine/coordinator/coordinator.py Coordinator": "the parts that it connects; what they have in common is in notifications.py",
    "engine/coordinator/placement/slot_pool.py SlotPool": "the wait for slots, and what is known of those that came",
    "inprocess/in_process_job.py InProcessJob": "stands for a driver, a cluster and a slot at once",
    "runtime/network/connection.py Connection": "handshake, sending and receiving of one socket share its buffers",
    "lab/midstream_lab/campaign.py Summary": "one count each",
    "simulation/cluster.py SimulatedDriver": "what is checked of a driver, one by one",
    "lab/midstream_lab/restarter.py Restarter": "what a run has come to, one by one",
    "lab/midstream_lab/checkers/checkpoint_checker.py CheckpointChecker": "what is remembered of older checkpoints, one by one",
    "lab/midstream_lab/run.py Run": "the parts of one world",
}
"""What is longer or larger has a reason."""

USERS_CLASSES = {
    "api/environment.py",
    "api/data_stream.py",
    "api/row_transformations.py",
    "api/keyed_streams.py",
    "api/windowed_streams.py",
    "api/connected_streams.py",
}
"""What users call: every public method is documented."""

UNDOCUMENTED_LINES_MAX = 25
"""A function whose name and types say everything is short."""

FORBIDDEN_TEXT = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|(?<![\w.])/(work|root|home)/")
FORBIDDEN_NAMES = re.compile(r"(Manager|Helper|Helpers|Util|Utils|Impl)$")


def _lines_without_docstrings(file: Path) -> int:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node, clean=False) for node in ast.walk(tree_of(file)) if isinstance(node, documented)]
    in_docstrings = sum(text.count("\n") + 1 for text in texts if text is not None)
    return len(file.read_text(encoding="utf-8").splitlines()) - in_docstrings


def test_a_file_is_one_idea():
    lines = {name_of(file): _lines_without_docstrings(file) for file in all_files()}
    assert {name: count for name, count in lines.items() if count > LINES_MAX} == {}, "split them"


def _forbidden(file: Path) -> Iterator[str]:
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if found := FORBIDDEN_TEXT.search(line):
            yield f"{name_of(file)}:{number}: {found[0]!r}"
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ClassDef) and FORBIDDEN_NAMES.search(node.name):
            yield f"{name_of(file)}:{node.lineno}: {node.name} says nothing"


def test_names_and_comments_say_what_is_not_what_is_left_to_do():
    assert [offence for file in all_files() for offence in _forbidden(file)] == []


def _undocumented(file: Path) -> Iterator[str]:
    """Public classes of the API and their methods without a docstring; elsewhere long functions."""
    api = name_of(file) in USERS_CLASSES

    def look(body: list[ast.stmt], within_class: bool) -> Iterator[str]:
        for node in body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
            if decorators & {"overload", "property"}:
                continue
            needed = api if isinstance(node, ast.ClassDef) or within_class else lines > UNDOCUMENTED_LINES_MAX
            if needed and ast.get_docstring(node) is None:
                yield f"{name_of(file)}:{node.lineno}: {node.name}"
            if api and isinstance(node, ast.ClassDef):
                yield from look(node.body, within_class=True)

    return look(tree_of(file).body, within_class=False)


def test_public_functions_say_what_they_are_for():
    assert [offence for file in all_files() for offence in _undocumented(file)] == []


@pytest.mark.parametrize("module", ["midstream", "midstream.cli.main"])
def test_importing_starts_without_pyspark(module):
    code = f"import sys, {module}; sys.exit('pyspark' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s(60), check=False
    )
    assert done.returncode == 0, done.stderr or f"import {module} imports pyspark"


def _long_functions(file: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = ast.get_docstring(node, clean=False)
            lines = (node.end_lineno or 0) - node.lineno + 1 - (docstring.count("\n") + 1 if docstring else 0)
            if lines > FUNCTION_LINES_MAX:
                yield f"{name_of(file)} {node.name}"


def _large_classes(file: Path) -> Iterator[str]:
    for node in ast.walk(tree_of(file)):
        if isinstance(node, ast.ClassDef):
            fields = {x.target.id for x in node.body if isinstance(x, ast.AnnAssign) and isinstance(x.target, ast.Name)}
            assigned = {
                x.attr
                for x in ast.walk(node)
                if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store) and ast.unparse(x.value) == "self"
            }
            is_record = any("dataclass" in ast.unparse(x) for x in node.decorator_list) or any(
                "Struct" in ast.unparse(x) for x in node.bases
            )
            if len(assigned if is_record else assigned | fields) > ATTRIBUTES_MAX:
                yield f"{name_of(file)} {node.name}"


def test_each_class_of_the_product_has_a_name_of_its_own() -> None:
    files: dict[str, list[str]] = {}
    for file in all_files():
        if "midstream_lab" not in name_of(file):
            for node in tree_of(file).body:
                if isinstance(node, ast.ClassDef):
                    files.setdefault(node.name, []).append(name_of(file))
    assert {name: found for name, found in files.items() if len(found) > 1} == {}


FOREIGN_NAMES = {
    *("attemptNumber", "partitionId", "taskAttemptId", "spark.task.maxFailures"),
    *("rd_kafka_message_t", "transactional.id.expiration.ms"),
    *("NA", "_total", "struct.with_fields"),
}
"""Names of other systems in docstrings, which no code has."""


def test_names_in_docstrings_exist() -> None:
    """A module or class that has been moved or renamed must not live on in the words about it."""
    known, quoted = set(dir(builtins)), []
    for file in all_files():
        text = file.read_text(encoding="utf-8")
        known.update(file.relative_to(ROOT).with_suffix("").parts)
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                known.add(token.string)
            elif token.type == tokenize.STRING and "\n" not in token.string:
                known.update(re.findall(r"\w+", re.sub(r"`[^`]*`", "", token.string)))
        for node in ast.walk(tree_of(file)) if file.is_relative_to(SOURCE) else ():
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                quoted += [(file, name) for name in re.findall(r"`([A-Za-z_][\w.]*)(?:\(\))?`", node.value.value)]
    lost = {
        f"{name_of(file)}: {name}"
        for file, name in quoted
        if name not in FOREIGN_NAMES and not all(part in known for part in name.split(".") if part)
    }
    assert not lost, "\n".join(sorted(lost))


def test_long_functions_and_large_classes_have_a_reason() -> None:
    assert {name for file in all_files() for name in _long_functions(file)} == LONG_FUNCTIONS.keys()
    assert {name for file in all_files() for name in _large_classes(file)} == LARGE_CLASSES.keys()
