"""Run one function in several processes that begin together, and gather what they return."""

from __future__ import annotations

import multiprocessing
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

START_S_MAX = 60.0


@dataclass(frozen=True)
class Done:
    results: list[Any]
    seconds: float
    """From all of them being ready to the last one's end."""
    memory_mb: float
    """Peak resident sizes, summed."""


def run_together(function: Callable[..., Any], arguments: list[tuple[Any, ...]]) -> Done:
    """`function(begin, *arguments)`: it calls `begin()` once it is ready. Raises RuntimeError when one fails."""
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(len(arguments))
    found: list[tuple[Any, float, float, int]] = []
    processes, pipes = [], []
    for own in arguments:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_report, args=(sender, barrier, function, own), daemon=True)
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        for pipe in pipes:
            try:
                found.append(pipe.recv())
            except EOFError:
                raise RuntimeError("a process of the loop has failed; its error is above") from None
    finally:
        for process in processes:
            if len(found) < len(processes):
                process.terminate()
            process.join()
    results, begins_s, ends_s, peaks = zip(*found, strict=True)
    return Done(list(results), max(ends_s) - min(begins_s), round(sum(peaks) / 1e6, 1))


def _report(pipe: Any, barrier: Any, function: Callable[..., Any], own: tuple[Any, ...]) -> None:
    began_s: list[float] = []

    def begin() -> None:
        barrier.wait(START_S_MAX)
        began_s.append(time.monotonic())

    try:
        result = function(begin, *own)
    except BaseException:
        barrier.abort()
        raise
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    pipe.send((result, began_s[0], time.monotonic(), peak))
