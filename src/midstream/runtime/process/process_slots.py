"""Slots as plain child processes of the driver, without Spark or a JVM. For tests and single machines.

    driver                                   python -m midstream.runtime.process.process_slots
    u32 length, msgpack launch → stdin       reads it, then is a slot (`runtime.process.slot_main`)
    keeps stdin open                         ends when it closes: the driver is gone
    copies stdout                        ←   stdout
    copies stderr, keeps its last lines  ←   stderr

The job's secret is never on a command line or in the environment. A slot's exit status is 0 if it was released;
otherwise a line that begins with `LAST_WORD` gives the reason, to the driver only. Both outputs go to the driver's
`sys.stdout` and `sys.stderr` as they are at that moment, so that code which draws on the terminal, or captures output,
can replace them.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import signal
import subprocess
import sys
import threading
import time
from typing import IO, Final

import msgspec

from midstream.engine.core.errors import ClusterError, MidstreamError
from midstream.engine.core.interfaces import SlotAvailability
from midstream.engine.protocol.framing import LENGTH, LENGTH_BYTES
from midstream.runtime.network.ports import ANY_PORT
from midstream.runtime.process.slot_output import SlotOutput
from midstream.runtime.process.slot_provider import OnFailed, OnLeaving, SlotLaunch
from midstream.runtime.process.thread_limits import ENVIRONMENT
from midstream.runtime.process.watched_slots import MEMORY_ADVICE, SlotEnd, WatchedSlot, end_all

KILL_WAIT_S: Final = 5.0
ORPHAN_WAIT_S: Final = 5.0
"""How long a slot whose driver is gone may take to end in good order."""
LAUNCH_BYTES_MAX: Final = 2**20
LAST_LINES: Final = 8
LAST_WORD: Final = "\x1e"
FATAL: Final = "Fatal Python error: "
"""The beginning of `faulthandler`'s report of a crash."""
_STOP_REQUESTED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals with which others end a process."""
LAST_OUTPUT_WAIT_S: Final = 1.0
COPIED_BYTES_MAX: Final = 2**16
COPIED_LINE_BYTES_MAX: Final = 2**20
"""The limit on a line; longer ones may be interleaved with others, and have a replaced character at the cut."""


class ProcessSlots:
    """Slots as plain processes of this machine, without Spark or a JVM; for tests and single machines.

    `slots_max`: how many may run concurrently; a job that needs more raises ClusterError at its start. None for no limit.

        from midstream.runtime.process.process_slots import ProcessSlots

        status = env.execute(slots=ProcessSlots())
    """

    bind_host = "127.0.0.1"
    driver_host = "127.0.0.1"
    driver_ports = slot_ports = ANY_PORT
    gone = ""

    def __init__(self, slots_max: int | None = None) -> None:
        self._slots_max = slots_max
        self._children: dict[str, _Child] = {}
        self._closed = False

    def check(self, slots: int) -> None:
        if self._closed:
            raise ClusterError(
                "these ProcessSlots belong to a job that has ended; give each job its own: ProcessSlots()"
            )
        if self._slots_max is not None and slots > self._slots_max:
            raise ClusterError(f"the job needs {slots} slots, but there are {self._slots_max}; lower its parallelism")

    @property
    def pids(self) -> dict[str, int]:
        """The process id of each request that has not ended."""
        return {request: child.pid for request, child in self._children.items() if child.lives}

    def request(self, launch: SlotLaunch, on_failed: OnFailed, on_leaving: OnLeaving) -> None:
        """Start a slot. `on_leaving` is never called, since there is only this machine."""
        assert not self._closed and launch.request not in self._children
        self._children[launch.request] = _Child(launch, on_failed)

    def availability(self) -> SlotAvailability:
        """Return nothing that is known: a process starts, or fails to.

        Returns an empty `SlotAvailability`.

            assert ProcessSlots().availability() == SlotAvailability()
        """
        return SlotAvailability()

    def abandon(self, request: str) -> None:
        child = self._children[request]
        child.let_go()
        child.kill()

    def close(self) -> None:
        self._closed = True
        hanging = end_all(self._children.values(), KILL_WAIT_S)
        if hanging:
            raise ClusterError(f"slot processes that cannot be killed: {[child.pid for child in hanging]}")


class _Child(WatchedSlot):
    def __init__(self, launch: SlotLaunch, on_failed: OnFailed) -> None:
        super().__init__(f"midstream-slot-{launch.request}", on_failed)
        try:
            # a separate session, so that Ctrl-C in the terminal reaches only the driver, which ends its slots itself
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, **os.environ},
                start_new_session=True,
            )
        except OSError as error:
            raise ClusterError(f"cannot start a slot process with {sys.executable}: {error.strerror}") from error
        self.pid = self._process.pid
        body = msgspec.msgpack.encode(launch)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already; the watching thread reports why
            self._process.stdin.write(LENGTH.pack(len(body)) + body)
            self._process.stdin.flush()
        self.watch()

    def let_go(self) -> None:
        super().let_go()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            self._process.stdin.close()

    def kill(self) -> None:
        """Kill the process and all processes that its functions have started."""
        if self.lives:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> SlotEnd:
        process = self._process
        assert process.stdout is not None and process.stderr is not None and process.stdin is not None
        copying = threading.Thread(target=_copy_stdout, args=(process.stdout,), name=f"stdout-{self.pid}", daemon=True)
        copying.start()
        last_word = ""
        fatal: list[str] = []
        for raw in process.stderr:
            line = raw.decode(errors="replace")
            if line.startswith(LAST_WORD):
                last_word = line.removeprefix(LAST_WORD).strip()
                continue
            if fatal or line.startswith(FATAL):
                fatal.append(line.rstrip())
                del fatal[LAST_LINES:]
            else:
                sys.stderr.write(line)
        status = process.wait()
        process.stderr.close()
        copying.join(LAST_OUTPUT_WAIT_S)  # longer only if a process that a function has started keeps it open
        with contextlib.suppress(BrokenPipeError):  # for input that the process has never read
            process.stdin.close()
        how = how_it_ended(status)
        is_own_doing = status and -status not in _STOP_REQUESTED and not last_word
        advice = f" ({MEMORY_ADVICE})" if status == -signal.SIGKILL else ""
        return SlotEnd(
            f"process {self.pid} {how}{advice}{': ' + last_word if last_word else ''}",
            f"a slot's process {how}" if is_own_doing else "",
            "\n".join(fatal),
        )


def _copy_stdout(stream: IO[bytes]) -> None:
    """Copy whole lines, in as few writes as possible."""
    rest = b""
    with stream:
        while data := os.read(stream.fileno(), COPIED_BYTES_MAX):
            lines, newline, rest = (rest + data).rpartition(b"\n")
            _print(lines + newline)
            if len(rest) > COPIED_LINE_BYTES_MAX:  # collecting a line of megabytes takes quadratic time
                _print(rest)
                rest = b""
    _print(rest)


def _print(data: bytes) -> None:
    if data:
        with contextlib.suppress(OSError, ValueError):  # stdout is no longer read, which must not block the slot
            sys.stdout.write(data.decode(errors="replace"))
            sys.stdout.flush()


def how_it_ended(status: int) -> str:
    """Describe how a process ended, from its exit status as `subprocess` reports it."""
    if status >= 0:
        return f"ended with status {status}{f', as after {_signal(status - 128)}' if status > 128 else ''}"
    return f"was killed by {_signal(-status)}"


def _signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# ---- in the child ------------------------------------------------------------


def main() -> int:
    """Run a slot. Returns 0 if it was released; 1 after an error, which is reported to the parent."""
    if sys.path[0] == os.getcwd():
        del sys.path[0]  # `-m` has added it; on a cluster, slots do not run where the job's modules are
    launch = msgspec.msgpack.decode(_read_launch(), type=SlotLaunch)
    faulthandler.enable(all_threads=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # stdout is a pipe, but users watch it
    threading.Thread(target=_end_with_the_driver, name="orphan", daemon=True).start()
    from midstream.runtime.process.slot_main import run_slot

    try:
        with SlotOutput(launch.log_levels, keeps_records=False) as capture:
            run_slot(launch, capture)
    except MidstreamError as error:
        text = " ".join(str(error).splitlines())
        print(f"{LAST_WORD}{type(error).__name__}: {text}", file=sys.stderr)  # noqa: T201 - what the parent reads
        return 1
    return 0


def _read_launch() -> bytes:
    (length,) = LENGTH.unpack(_read(LENGTH_BYTES))
    if length > LAUNCH_BYTES_MAX:
        raise ClusterError(f"a launch of {length} bytes on standard input")
    return _read(length)


def _read(count: int) -> bytes:
    data = b""
    while len(data) < count:
        # not sys.stdin: its lock must be free when the interpreter ends under the waiting thread
        piece = os.read(0, count - len(data))
        if not piece:
            raise ClusterError("standard input closed before the launch was read; this is not for use by hand")
        data += piece
    return data


def _end_with_the_driver() -> None:
    """End the process after its driver's end: losing the connection ends the slot, unless a user's function keeps it
    busy.
    """
    while os.read(0, 4096):
        pass
    time.sleep(ORPHAN_WAIT_S)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
