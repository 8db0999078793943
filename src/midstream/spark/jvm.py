"""The JVM of an embedded Spark: its launch, its output, and how an interrupt ends the launch."""

from __future__ import annotations

import atexit
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import psutil
from py4j.protocol import Py4JError
from pyspark import SparkConf, SparkContext
from pyspark.java_gateway import launch_gateway

LAST_OUTPUT_WAIT_S: Final = 1.0
END_WAIT_S: Final = 3.0
_NOISE: Final = b"WARNING: Using incubator modules: "
"""Spark requests these modules itself, so the line is useless to the reader."""


def log_option(settings: Path) -> str:
    """Return the Java option that makes Spark log as the file configures.

    It is a URI: Spark splits options at blanks, and log4j would interpret `%` and `#` in a plain path.
    """
    return f"-Dlog4j2.configurationFile={settings.absolute().as_uri()}"


def launch_jvm(settings: Mapping[str, str]) -> None:
    """Launch the JVM in a session of its own: what a terminal or `timeout` sends to the process group is for the
    driver.

    The driver ends in good order, with its slots; the JVM ends by itself when the driver is gone.
    """
    if SparkContext._gateway is not None:
        return
    conf = SparkConf(loadDefaults=False).setAll(list(settings.items()))
    reading, writing = os.pipe()
    copier = Copier(reading)
    copier.start()
    try:
        gateway = launch_gateway(conf, {"start_new_session": True, "stderr": writing})
    except Exception:
        os.close(writing)
        copier.join(LAST_OUTPUT_WAIT_S)  # Java's own output comes before ours
        raise
    os.close(writing)
    SparkContext._ensure_initialized(gateway=gateway)
    atexit.register(copier.finish, gateway.jvm.System.err.println)


class Copier(threading.Thread):
    """Copies what the JVM and its Python workers print to this program's standard error, line by line.

    It writes to the current `sys.stderr` rather than to an inherited descriptor, so that code which draws on the
    terminal, such as a spinner or live tables, or captures output, as a notebook does, can replace it.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(name="midstream-jvm-stderr", daemon=True)
        self._descriptor = descriptor
        self._mark = secrets.token_hex(16)
        self._is_over = threading.Event()

    def run(self) -> None:
        mark = self._mark.encode()
        with open(self._descriptor, "rb") as stream:
            for line in stream:
                if mark in line:
                    self._is_over.set()
                elif not line.startswith(_NOISE) and not self._is_over.is_set():
                    with suppress(OSError, ValueError):  # it is no longer read: the JVM must not wait for that
                        sys.stderr.write(line.decode(errors="replace"))
        self._is_over.set()

    def finish(self, print_line: Callable[[str], object]) -> None:
        """Copy what was printed before this call, and nothing more: at the end of the program `sys.stderr` goes away.

        `print_line` has the JVM print a line: what precedes it was printed before.
        """
        printing = threading.Thread(
            target=self._print_mark, args=(print_line,), name="midstream-jvm-last-words", daemon=True
        )
        printing.start()  # a JVM that hangs answers no call
        self._is_over.wait(LAST_OUTPUT_WAIT_S)
        self._is_over.set()

    def _print_mark(self, print_line: Callable[[str], object]) -> None:
        with suppress(Py4JError, OSError):
            print_line(self._mark)


@contextmanager
def interruptible() -> Iterator[None]:
    """Let a Ctrl-C while Spark starts end the start immediately, and with it the JVM that is being launched.

    Otherwise the JVM would live on in a program that continues, such as a notebook.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    before = _children()
    has_jvm = SparkContext._gateway is not None
    signal.signal(signal.SIGINT, handler)  # Python's handler: with that of polars, a blocking call would continue
    try:
        yield
    except KeyboardInterrupt:
        if not has_jvm:
            _end_jvm(_children() - before)
        raise


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def _end_jvm(children: set[psutil.Process]) -> None:
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    process: subprocess.Popen[bytes] | None = getattr(gateway, "proc", None)
    for child in children:
        with suppress(psutil.Error, ProcessLookupError):
            if (process is not None and child.pid == process.pid) or "spark" in " ".join(child.cmdline()):
                os.killpg(child.pid, signal.SIGKILL)  # it leads a session of its own
    psutil.wait_procs(children, END_WAIT_S)
