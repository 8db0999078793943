"""The job's own modules in a slot's process, importable from when the slot joins until it ends.

They are unpacked into a directory of the slot's own, so that compiled modules and data files work as on the driver.
Spark's Python workers serve one job after another: a job's modules are forgotten when its slot ends, or the next job
would run old code.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import io
import os
import pickle
import shutil
import socket
import sys
import tempfile
import zipfile
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from midstream.engine.core.errors import ClusterError, ConfigError, JobError
from midstream.engine.protocol.messages import JobModules

_PREFIX: Final = "midstream-modules-"
_LOCK: Final = ".lock"
"""Locked while the slot lives: a directory whose lock is free belongs to a killed slot."""
_CODE: Final = "code"


class UnpackedModules:
    """The unpacked modules. Problems with them are raised by `unpickle`, where they are the job's failure."""

    def __init__(self, shipped: JobModules) -> None:
        self._directory: Path | None = None
        self._lock: int | None = None
        self._names: set[str] = set()
        self._replaced: dict[str, ModuleType] = {}
        """The modules that the process had loaded under these names before."""
        self._problem: Exception | None = None
        try:
            if shipped.archive:
                self._unpack(shipped.archive)
        except OSError as error:
            self._problem = ClusterError(
                f"{socket.gethostname()}: the job's modules cannot be unpacked in {tempfile.gettempdir()}: {error}"
            )
            return
        missing = [text for name, text in shipped.packages if not _is_there(name)]
        if missing:
            self._problem = ConfigError(
                f"{sys.executable} on {socket.gethostname()}, which runs the slots, lacks what the job's code imports: "
                f"{', '.join(missing)}; install it there, or let PYSPARK_PYTHON name an interpreter that has it"
            )

    def unpickle(self, data: bytes) -> Any:
        """Unpickle. Raises ConfigError for missing modules, for which a retry cannot help."""
        if self._problem is not None:
            raise self._problem
        try:
            return pickle.loads(data)
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{sys.executable} on {socket.gethostname()}, which runs the slots, has no module {error.name!r}, which "
                "the job's code imports: install it there, or name its file in Environment(modules=…) or --py-files"
            ) from error
        except ImportError as error:
            raise ConfigError(
                f"{sys.executable} on {socket.gethostname()}, which runs the slots, cannot import what the job's code "
                f"imports: {error}"
            ) from error
        except Exception as error:  # a module's code may raise anything
            raise JobError(
                f"{type(error).__name__} in a slot on {socket.gethostname()} that unpickles the job: {error}; slots import "
                "the modules that its functions use, so their code must run there too (without a Spark session)"
            ) from error

    def close(self) -> None:
        """Restore the process's earlier modules."""
        directory, self._directory = self._directory, None
        if directory is None:
            return
        with suppress(ValueError):
            sys.path.remove(str(directory / _CODE))
        self._forget()
        sys.modules.update(self._replaced)
        importlib.invalidate_caches()
        shutil.rmtree(directory, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)

    def _unpack(self, archive: bytes) -> None:
        _sweep()
        directory = Path(tempfile.mkdtemp(prefix=f"new-{_PREFIX}"))
        self._lock = os.open(directory / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._directory = directory.rename(directory.with_name(directory.name.removeprefix("new-")))
        code = self._directory / _CODE
        with zipfile.ZipFile(io.BytesIO(archive)) as opened:
            opened.extractall(code)
            self._names = {name.split("/")[0].split(".")[0] for name in opened.namelist()}
        self._replaced = self._forget()
        sys.path.insert(0, str(code))
        importlib.invalidate_caches()

    def _forget(self) -> dict[str, ModuleType]:
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in self._names}


def _is_there(name: str) -> bool:
    try:
        return name in sys.modules or importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _sweep() -> None:
    """Delete what killed slots have left here."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):
            lock = os.open(left / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)
