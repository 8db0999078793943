"""Which modules of the user's a job takes along, and the archive in which they travel.

A slot imports them, as Spark's workers would: an archive of their files goes to every slot and is
unpacked there (`runtime.modules`). It holds what the job's file imports anywhere in its text, what the
pickled job refers to, what these import in turn, and what `modules=` names. Of a package all files go
along, data and compiled ones too; of a directory without `__init__.py`, which may be anything, only the
modules that are imported. What is installed (the standard library, site-packages) is expected to be there,
and slots say if it is not.
"""

from __future__ import annotations

import ast
import dis
import importlib.metadata
import importlib.util
import io
import os
import pickle
import sys
import zipfile
import zipimport
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, TypeAlias

import cloudpickle

from midstream.api.arguments import is_own_file
from midstream.core.errors import ConfigError, JobError
from midstream.core.installed import is_installed
from midstream.protocol.messages import JobModules

MODULES_BYTES_MAX: Final = 32 * 2**20
"""Of all files together; each slot gets them when it joins."""
_FILES_MAX: Final = 20_000
_ZIPS: Final = (".zip", ".egg", ".whl")
_ARCHIVED_AT: Final = (1980, 1, 1, 0, 0, 0)
"""The same files make the same archive."""
_EVERYWHERE: Final = frozenset(
    {"midstream", "pyspark", "py4j", "cloudpickle", "msgspec", "numpy", "polars", "psutil", "pyarrow"}
)
"""No slot runs without these, and it runs its own."""
_ADVICE: Final = "install it on the executors, or keep what is not code where all nodes can read it"

_Stamp: TypeAlias = tuple[ModuleSpec | None, int, int]
_noted: dict[str, _Stamp] = {}
"""Per module: by what it was loaded, and modification time and size of its file when it was first seen so."""


@dataclass(frozen=True)
class JobFile:
    """Where a program makes its Environment. Its own functions travel inside the job's pickle, by value."""

    file: str | None
    """None: it has none, as in a shell or a notebook."""
    package: str
    """Of which it is a part, for its relative imports; "" when it is in none."""


def job_file(file: str | None, variables: Mapping[str, Any]) -> JobFile:
    """That of the module with these global variables, whose functions travel by value from now on.

    Slots do not import it: it makes an Environment, reads what the job needs, and may start it.
    """
    name = variables.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is not None and name != "__main__" and vars(module) is variables:
        cloudpickle.register_pickle_by_value(module)
    return JobFile(None if file is None else os.path.abspath(file), variables.get("__package__") or "")


def note_modules() -> None:
    """Remember how the files of all local modules are now, to see at the start whether they have changed since."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(file, str) and not is_installed(file) and not is_own_file(file):
            _is_as_loaded(name, module, file)


def is_zip(path: str) -> bool:
    return path.endswith(_ZIPS)


def check_extra(paths: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Absolute paths of Python files, zips and directories. Raises ConfigError for what is none of these."""
    if isinstance(paths, (str, bytes, os.PathLike)):
        raise ConfigError(f"modules: {paths!r} is one path; give a list of them")
    found = []
    for path in paths:
        text = os.path.abspath(os.path.expanduser(os.fspath(path)))
        if not os.path.exists(text):
            raise ConfigError(f"modules: there is no {os.fspath(path)!r} (looked for {text})")
        name = os.path.basename(text)
        if os.path.isdir(text):
            if not name.isidentifier():
                raise ConfigError(
                    f"modules: the directory {text} cannot be imported, {name!r} is not the name of a package"
                )
        elif not name.endswith((".py", *EXTENSION_SUFFIXES, *_ZIPS)):
            raise ConfigError(f"modules: {text} is not a Python file, a package's directory or a zip")
        elif name.endswith(_ZIPS) and not zipfile.is_zipfile(text):
            raise ConfigError(f"modules: {text} is not a zip")
        found.append(text)
    return tuple(found)


def collect(job: JobFile, extra: Iterable[str], pickled: bytes) -> JobModules:
    """`extra`: as `check_extra` gives them; `pickled`: the job graph.

    Raises JobError when they are too large, when one has changed since it was imported, or when the
    job refers to a module that has no file.
    """
    search = _Search()
    for path in extra:
        search.add_path(path)
    references = _references(pickled)
    for name in references:
        search.refer(name)
    for name in _mentioned(job):
        search.visit(name, needed=False)
    return JobModules(_archive(search.files), tuple(sorted((name, _version(name)) for name in search.packages)))


@dataclass
class _Search:
    """What is found so far."""

    files: dict[str, str | tuple[str, str]] = field(default_factory=dict)
    """By its name in the archive, each file's path, or the zip and the name in it."""
    packages: set[str] = field(default_factory=set)
    """Installed ones that slots import when they unpickle the job."""
    _seen: dict[str, bool] = field(default_factory=dict)
    _tops: dict[str, bool | None] = field(default_factory=dict)
    """Whether each top-level name is local; None: it needs nothing."""
    _trees: set[str] = field(default_factory=set)
    """Packages of which all files are taken along."""

    def add_path(self, path: str) -> None:
        name = os.path.basename(path)
        if name.endswith(_ZIPS):
            self._add_zip(path)
            return
        if os.path.isdir(path):
            self._add_tree(path, name)
        else:
            self.files[name] = path
        for file in [file for file in self.files.values() if isinstance(file, str) and file.endswith(".py")]:
            package = name if os.path.isdir(path) else ""
            for imported, _ in _imports_of(_text_of(file), package):
                self.visit(imported, needed=False)

    def refer(self, name: str) -> None:
        """The pickled job imports this one."""
        if name == "__main__":
            return
        top = name.partition(".")[0]
        of_package = name != top and not self._is_local(top)  # installed ones may make modules of their own
        if name in sys.modules and _spec(name) is None and not of_package:
            raise JobError(
                f"the job uses module {name!r}, which was not loaded from a file that can be sent to the slots; "
                "put it into a file that can be imported"
            )
        self.visit(name, needed=True)

    def visit(self, name: str, needed: bool) -> None:
        """`needed`: a slot that unpickles the job imports it, in any case."""
        waiting = [(name, needed)]
        while waiting:
            name, needed = waiting.pop()
            if self._seen.get(name) or (name in self._seen and not needed):
                continue
            self._seen[name] = needed
            top = name.partition(".")[0]
            is_local = self._is_local(top)
            if is_local is False and needed:
                self.packages.add(top)
            spec = _spec(name) if is_local else None
            if spec is None or (spec.origin and is_installed(spec.origin)):  # an attribute of a module, or installed
                continue
            waiting.extend((member, False) for member in self._add(name, spec))
            module = sys.modules.get(name)
            if module is not None and spec.origin and not _is_as_loaded(name, module, spec.origin):
                raise JobError(
                    f"module {name!r} ({spec.origin}) has been changed since it was imported, so slots would run other "
                    "code than this program; importlib.reload() it, or start the program again"
                )
            parent = name.rpartition(".")[0]
            if parent:
                waiting.append((parent, needed))
            package = name if spec.submodule_search_locations is not None else parent
            waiting.extend((imported, needed and always) for imported, always in _imports_of(_source(spec), package))

    def _is_local(self, top: str) -> bool | None:
        if top not in self._tops:
            self._tops[top] = self._take(top)
        return self._tops[top]

    def _take(self, top: str) -> bool | None:
        """Whether that top-level module is local. A zip is taken along as a whole."""
        spec = None if top in _EVERYWHERE else _spec(top)
        if spec is None or spec.origin in ("built-in", "frozen"):
            return None
        if isinstance(spec.loader, zipimport.zipimporter):
            if is_installed(spec.loader.archive):
                return False
            self._add_zip(spec.loader.archive)
            self._trees.add(top)
            return True
        if spec.origin is None:
            return not all(map(is_installed, spec.submodule_search_locations or ()))
        if is_own_file(spec.origin):
            return None
        if is_installed(spec.origin):
            return None if top in sys.stdlib_module_names else False
        above = os.path.dirname(os.path.abspath(spec.origin))
        return not _is_target(above if spec.submodule_search_locations is None else os.path.dirname(above))

    def _add(self, name: str, spec: ModuleSpec) -> Iterable[str]:
        """The files of a local module; which others belong to it."""
        parts = name.split(".")
        if any(".".join(parts[:end]) in self._trees for end in range(1, len(parts) + 1)):
            return ()
        path = os.path.join(*parts)
        if spec.origin is None:
            return [loaded for loaded in sys.modules if loaded.startswith(f"{name}.")]
        if spec.submodule_search_locations is None:
            base = os.path.basename(spec.origin)
            self.files[path + base[base.index(".") :]] = spec.origin
        else:
            self._trees.add(name)
            self._add_tree(os.path.dirname(spec.origin), path)
        return ()

    def _add_zip(self, path: str) -> None:
        with zipfile.ZipFile(path) as opened:
            for entry in opened.infolist():
                if not entry.is_dir():
                    self.files[entry.filename] = (path, entry.filename)

    def _add_tree(self, root: str, name: str) -> None:
        """What is hidden, cached or an environment of its own stays."""
        entered = set()
        for above, directories, files in os.walk(root, followlinks=True):
            real = os.path.realpath(above)
            if real in entered or (above != root and ("pyvenv.cfg" in files or is_installed(above + os.sep))):
                directories.clear()
                continue
            entered.add(real)
            directories[:] = sorted(each for each in directories if each[0] != "." and each != "__pycache__")
            below = os.path.relpath(above, root)
            for file in sorted(files):
                self.files[os.path.normpath(os.path.join(name, below, file))] = os.path.join(above, file)
            if len(self.files) > _FILES_MAX:
                raise JobError(
                    f"the job's modules have more than {_FILES_MAX:,} files, most of them in {root}; {_ADVICE}"
                )


def top_level_names(modules: JobModules) -> frozenset[str]:
    """Of the modules and packages that travel."""
    if not modules.archive:
        return frozenset()
    with zipfile.ZipFile(io.BytesIO(modules.archive)) as opened:
        names = {name.partition("/")[0].partition(".")[0] for name in opened.namelist()}
    return frozenset(name for name in names if name.isidentifier() and name != "__main__") - _EVERYWHERE


def _archive(files: dict[str, str | tuple[str, str]]) -> bytes:
    if not files:
        return b""
    sizes = {}
    for name, place in files.items():
        if isinstance(place, str):
            sizes[name] = os.stat(place).st_size
        else:
            with zipfile.ZipFile(place[0]) as opened:
                sizes[name] = opened.getinfo(place[1]).file_size
    if sum(sizes.values()) > MODULES_BYTES_MAX:
        biggest = max(sizes, key=lambda name: sizes[name])
        place = files[biggest]
        raise JobError(
            f"the job's modules have {_mib(sum(sizes.values()))}, up to {_mib(MODULES_BYTES_MAX)} can be sent to the slots; "
            f"the biggest file is {place if isinstance(place, str) else os.path.join(*place)} ({_mib(sizes[biggest])}), "
            f"which belongs to {biggest.split(os.sep)[0].split('.')[0]!r}: {_ADVICE}"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for name, place in sorted(files.items()):
            made.writestr(
                zipfile.ZipInfo(name.replace(os.sep, "/"), _ARCHIVED_AT), _bytes_of(place), zipfile.ZIP_DEFLATED
            )
    return buffer.getvalue()


def _bytes_of(place: str | tuple[str, str]) -> bytes:
    if isinstance(place, str):
        with open(place, "rb") as opened:
            return opened.read()
    with zipfile.ZipFile(place[0]) as opened_zip:
        return opened_zip.read(place[1])


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


# ---- what is installed -------------------------------------------------------


@lru_cache(1024)
def _is_target(directory: str) -> bool:
    """Whether packages were installed there (`pip install --target`)."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(directory or os.sep))
    except OSError:
        return False


def _version(name: str) -> str:
    """The distribution that has that module, such as "pillow 11.0" for PIL."""
    for distribution in _distributions().get(name, ()):
        return f"{distribution} {importlib.metadata.version(distribution)}"
    return name


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


# ---- what refers to modules -----------------------------------------------------


class _Recorder(pickle.Unpickler):
    """Notes whatever it imports; cloudpickle imports a module that a function uses by calling `subimport`."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.names: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        self.names.add(module)
        found = super().find_class(module, name)
        if module.startswith("cloudpickle.") and name == "subimport":
            return self._subimport(found)
        return found

    def _subimport(self, subimport: Callable[[str], object]) -> Callable[[str], object]:
        def noted(name: str) -> object:
            self.names.add(name)
            return subimport(name)

        return noted


def _references(pickled: bytes) -> list[str]:
    recorder = _Recorder(pickled)
    try:
        recorder.load()
    except Exception as error:  # any __setstate__ may raise anything
        raise JobError(f"slots cannot unpickle the job: {type(error).__name__}: {error}") from error
    return sorted(recorder.names)


def _mentioned(job: JobFile) -> Iterator[str]:
    """Whatever the job's file and the program's main file import, and what a shell or a notebook has imported."""
    main = sys.modules.get("__main__")
    main_file = getattr(main, "__file__", None)
    files = {job.file: job.package}
    if isinstance(main_file, str) and not is_installed(main_file) and not is_own_file(main_file):
        files.setdefault(os.path.abspath(main_file), getattr(main, "__package__", None) or "")
    for file, package in files.items():
        if file is not None:
            yield from (name for name, _ in _imports_of(_text_of(file), package))
    if job.file is None and main is not None:
        for value in list(vars(main).values()):
            if isinstance(value, ModuleType):
                yield value.__name__
            elif isinstance(value, FunctionType) and value.__module__ == "__main__":
                yield from _imports_of_code(value.__code__)
            elif isinstance(getattr(value, "__module__", None), str) and isinstance(value, (type, FunctionType)):
                yield value.__module__


def _imports_of_code(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IMPORT_NAME":
            yield str(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _imports_of_code(constant)


@lru_cache(1024)
def _imports_of(source: str, package: str) -> tuple[tuple[str, bool], ...]:
    """What a module of `package` imports, and whether whoever imports it always does."""
    try:
        return tuple(_imports(ast.parse(source), package, always=True))
    except (SyntaxError, ValueError, RecursionError):  # whoever imports it will hear of it
        return ()


def _imports(node: ast.AST, package: str, always: bool) -> Iterator[tuple[str, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, always) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, package)
            if base:
                yield base, always
                yield from ((f"{base}.{alias.name}", always) for alias in child.names)
        elif isinstance(child, ast.If):
            if "TYPE_CHECKING" not in ast.unparse(child.test):
                yield from _imports(child, package, always=False)
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Try)):
            yield from _imports(child, package, always=False)
        elif not isinstance(child, ast.expr):
            yield from _imports(child, package, always)


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if not node.level:
        return node.module or ""
    try:
        return importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)
    except (ImportError, ValueError):
        return ""


def _spec(name: str) -> ModuleSpec | None:
    """How that module was or would be loaded; imports nothing."""
    module = sys.modules.get(name)
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    if spec is not None and spec.name == name and (spec.origin or spec.submodule_search_locations):
        return spec
    file = getattr(module, "__file__", None)
    if isinstance(file, str) and name != "__main__":
        return importlib.util.spec_from_file_location(name, file)
    parent = name.rpartition(".")[0]
    try:
        if not parent:
            return importlib.util.find_spec(name)
        above = _spec(parent)
        places = None if above is None else above.submodule_search_locations
        return None if places is None else PathFinder.find_spec(name, list(places))
    except (ImportError, ValueError, AttributeError):
        return None


def _source(spec: ModuleSpec) -> str:
    get_source = getattr(spec.loader, "get_source", None)
    try:
        return (get_source(spec.name) if get_source is not None else None) or ""
    except (ImportError, OSError, UnicodeDecodeError):
        return ""


def _text_of(file: str) -> str:
    try:
        with open(file, "rb") as opened:
            return importlib.util.decode_source(opened.read())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return ""


def _is_as_loaded(name: str, module: ModuleType, file: str) -> bool:
    """Whether the module's file is as it was when this was asked first since the module was loaded."""
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    try:
        found = os.stat(file)
    except OSError:  # a zip's, or gone
        return True
    noted = _noted.get(name)
    if noted is None or noted[0] is not spec:
        _noted[name] = spec, found.st_mtime_ns, found.st_size
        return True
    return noted[1:] == (found.st_mtime_ns, found.st_size)
