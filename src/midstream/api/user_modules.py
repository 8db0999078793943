"""The user's modules that a job ships, and their archive.

A slot imports them, as Spark's workers would: an archive of their files is sent to every slot and
unpacked there (`runtime.process.unpacked_modules`). It holds the modules that the job file imports anywhere in its text, those
to which the pickled job refers, those that these import in turn, and those that `modules=` names. A package is
shipped with all files, data and compiled ones too. A directory without `__init__.py` may hold anything, so
only its imported modules are shipped. Installed modules (the standard library, site-packages) are expected to
be there, and a slot reports those that are missing.
"""

from __future__ import annotations

import ast
import dis
import importlib.metadata
import importlib.util
import io
import os
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

from midstream.api.argument_checks import is_own_file
from midstream.engine.core.errors import ConfigError, JobError
from midstream.engine.core.job_pickle import ApartUnpickler
from midstream.engine.core.site_packages import is_installed
from midstream.engine.protocol.messages import JobModules

MODULES_BYTES_MAX: Final = 32 * 2**20
"""Maximum size of all files together; each slot gets them when it joins."""
_FILES_MAX: Final = 20_000
_ZIPS: Final = (".zip", ".egg", ".whl")
_ARCHIVED_AT: Final = (1980, 1, 1, 0, 0, 0)
"""The time of all entries, so that the same files give the same archive."""
_EVERYWHERE: Final = frozenset(
    {"midstream", "pyspark", "py4j", "cloudpickle", "msgspec", "numpy", "polars", "psutil", "pyarrow"}
)
"""Packages that every slot has, in its own version."""
_ADVICE: Final = "install it on the executors, or keep what is not code where all nodes can read it"

_Stamp: TypeAlias = tuple[ModuleSpec | None, int, int]
_noted: dict[str, _Stamp] = {}
"""Per module: the spec that loaded it, and the modification time and size of its file when first seen with it."""


@dataclass(frozen=True)
class JobFile:
    """The file in which a program creates its Environment. Its functions travel by value, in the job's pickle."""

    file: str | None
    """None if there is no file, as in a shell or a notebook."""
    package: str
    """The package that it is part of, for relative imports; "" if there is none."""


def job_file(file: str | None, variables: Mapping[str, Any]) -> JobFile:
    """Return the JobFile of the module with these global variables, and have its functions pickled by value.

    Slots do not import this module: it creates an Environment, reads what the job needs, and may start it.
    """
    name = variables.get("__name__")
    module = sys.modules.get(name) if isinstance(name, str) else None
    if module is not None and name != "__main__" and vars(module) is variables:
        cloudpickle.register_pickle_by_value(module)
    return JobFile(None if file is None else os.path.abspath(file), variables.get("__package__") or "")


def note_modules() -> None:
    """Record the state of the files of all local modules, to detect at the start whether they have changed."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
        if isinstance(file, str) and not is_installed(file) and not is_own_file(file):
            _is_as_loaded(name, module, file)


def is_zip(path: str) -> bool:
    return path.endswith(_ZIPS)


def check_extra(paths: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Return the absolute paths of Python files, zips and directories. Raises ConfigError for any other path."""
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
    """Return the modules to ship. `extra`: paths from `check_extra`; `pickled`: the job graph.

    Raises JobError if the modules are too large, if one has changed since it was imported, or if the job
    refers to a module that has no file.
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
    """The files and packages found so far."""

    files: dict[str, str | tuple[str, str]] = field(default_factory=dict)
    """By name in the archive: each file's path, or the zip and the name in it."""
    packages: set[str] = field(default_factory=set)
    """Installed packages that slots import when they unpickle the job."""
    _seen: dict[str, bool] = field(default_factory=dict)
    _tops: dict[str, bool | None] = field(default_factory=dict)
    """Whether each top-level name is local; None if nothing has to be done for it."""
    _trees: set[str] = field(default_factory=set)
    """Packages of which all files are shipped."""

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
        """Visit a module that the pickled job imports."""
        if name == "__main__":
            return
        top = name.partition(".")[0]
        of_package = name != top and not self._is_local(top)  # installed packages may create modules at run time
        if name in sys.modules and _spec(name) is None and not of_package:
            raise JobError(
                f"the job uses module {name!r}, which was not loaded from a file that can be sent to the slots; "
                "put it into a file that can be imported"
            )
        self.visit(name, needed=True)

    def visit(self, name: str, needed: bool) -> None:
        """Add a module and everything it imports. `needed`: a slot that unpickles the job imports it in any case."""
        pending = [(name, needed)]
        while pending:
            name, needed = pending.pop()
            if self._seen.get(name) or (name in self._seen and not needed):
                continue
            self._seen[name] = needed
            top = name.partition(".")[0]
            is_local = self._is_local(top)
            if is_local is False and needed:
                self.packages.add(top)
            spec = _spec(name) if is_local else None
            if spec is None or (spec.origin and is_installed(spec.origin)):  # no module, or an installed one
                continue
            pending.extend((member, False) for member in self._add(name, spec))
            module = sys.modules.get(name)
            if module is not None and spec.origin and not _is_as_loaded(name, module, spec.origin):
                raise JobError(
                    f"module {name!r} ({spec.origin}) has been changed since it was imported, so slots would run other "
                    "code than this program; importlib.reload() it, or start the program again"
                )
            parent = name.rpartition(".")[0]
            if parent:
                pending.append((parent, needed))
            package = name if spec.submodule_search_locations is not None else parent
            pending.extend((imported, needed and always) for imported, always in _imports_of(_source(spec), package))

    def _is_local(self, top: str) -> bool | None:
        if top not in self._tops:
            self._tops[top] = self._take(top)
        return self._tops[top]

    def _take(self, top: str) -> bool | None:
        """Return whether that top-level module is local; add a zip as a whole."""
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
        """Add the files of a local module; return the names of further modules that belong to it."""
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
        """Add all files of a directory, except hidden ones, caches, and virtual environments."""
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
    """Return the top-level names of the modules and packages that are shipped."""
    if not modules.archive:
        return frozenset()
    with zipfile.ZipFile(io.BytesIO(modules.archive)) as opened:
        names = {name.partition("/")[0].partition(".")[0] for name in opened.namelist()}
    return frozenset(name for name in names if name.isidentifier() and name != "__main__") - _EVERYWHERE


def _archive(files: dict[str, str | tuple[str, str]]) -> bytes:
    if not files:
        return b""
    sizes = {}
    for name, location in files.items():
        if isinstance(location, str):
            sizes[name] = os.stat(location).st_size
        else:
            with zipfile.ZipFile(location[0]) as opened:
                sizes[name] = opened.getinfo(location[1]).file_size
    if sum(sizes.values()) > MODULES_BYTES_MAX:
        biggest = max(sizes, key=lambda name: sizes[name])
        location = files[biggest]
        raise JobError(
            f"the job's modules have {_mib(sum(sizes.values()))}, up to {_mib(MODULES_BYTES_MAX)} can be sent to the slots; "
            f"the biggest file is {location if isinstance(location, str) else os.path.join(*location)} ({_mib(sizes[biggest])}), "
            f"which belongs to {biggest.split(os.sep)[0].split('.')[0]!r}: {_ADVICE}"
        )
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as made:
        for name, location in sorted(files.items()):
            made.writestr(
                zipfile.ZipInfo(name.replace(os.sep, "/"), _ARCHIVED_AT), _bytes_of(location), zipfile.ZIP_DEFLATED
            )
    return buffer.getvalue()


def _bytes_of(location: str | tuple[str, str]) -> bytes:
    if isinstance(location, str):
        with open(location, "rb") as opened:
            return opened.read()
    with zipfile.ZipFile(location[0]) as opened_zip:
        return opened_zip.read(location[1])


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


# ---- what is installed -------------------------------------------------------


@lru_cache(1024)
def _is_target(directory: str) -> bool:
    """Return whether packages were installed there (`pip install --target`)."""
    try:
        return any(name.endswith(".dist-info") for name in os.listdir(directory or os.sep))
    except OSError:
        return False


def _version(name: str) -> str:
    """Return the distribution that has that module, such as "pillow 11.0" for PIL."""
    for distribution in _distributions().get(name, ()):
        return f"{distribution} {importlib.metadata.version(distribution)}"
    return name


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


# ---- what refers to modules -----------------------------------------------------


class _Recorder(ApartUnpickler):
    """Records all modules that it imports; cloudpickle imports a module that a function uses by calling `subimport`."""

    def __init__(self, data: bytes) -> None:
        super().__init__(data)
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
    """Yield the modules that the job file and the program's main file import, and those of a shell or a notebook."""
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
    """Return the imports of a module of `package`, each with whether it runs whenever the module is imported."""
    try:
        return tuple(_imports(ast.parse(source), package, always=True))
    except (SyntaxError, ValueError, RecursionError):  # importing it will report the error
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
    """Return how that module was or would be loaded; imports nothing."""
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
        locations = None if above is None else above.submodule_search_locations
        return None if locations is None else PathFinder.find_spec(name, list(locations))
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
    """Return whether the module's file is unchanged since the first call after the module was loaded."""
    spec: ModuleSpec | None = getattr(module, "__spec__", None)
    try:
        found = os.stat(file)
    except OSError:  # the file is in a zip, or was removed
        return True
    noted = _noted.get(name)
    if noted is None or noted[0] is not spec:
        _noted[name] = spec, found.st_mtime_ns, found.st_size
        return True
    return noted[1:] == (found.st_mtime_ns, found.st_size)
