"""Runs many seeds of one job: in this process, or in several, each of which has another hash() of strings."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import BinaryIO, Final

import msgspec

from midstream.engine.core.error_rows import counted
from midstream.engine.core.errors import ClusterError
from midstream.engine.core.job_pickle import pickled
from midstream.inprocess.own_modules import by_value, own_modules
from midstream.simulation.garbage_collection import collect, collecting_rarely
from midstream.testing.simulation.causes import Cause, Diagnosis, all_clues, diagnose
from midstream.testing.simulation.code_hints import Clue, Habit
from midstream.testing.simulation.job_scenario import REFERENCE, JobScenario, draw
from midstream.testing.simulation.output_compare import Contract
from midstream.testing.simulation.simulated_job import SimulatedJob
from midstream.testing.simulation.simulated_run import Ran, run_job
from midstream.testing.simulation.verdict import DIFFERS, EFFECT, ENGINE, FAILS, LONG, Small, Verdict, judge, shrink

LINE_BYTES_MAX: Final = 1 << 20
PROBE: Final = -1
"""The seed by which the reference run is requested from another process."""
WARNED: Final = (Habit.UNSIMULATED, Habit.REAL_CLOCK, Habit.EFFECT)
PROBES: Final = 2
"""The number of processes that only make the reference run, if seeds are run in this process."""
SILENCE_S: Final = 300.0
"""How long a process may take for one run."""


class Finished(msgspec.Struct, frozen=True):
    """A process's result for one seed, as a line of JSON."""

    seed: int
    kind: str
    lines: list[str] = []


@dataclass(slots=True)
class Report:
    """The result of all seeds. `ok` if no run differs from the reference run.

    For example:

        >>> report = testing.simulate(orders.filter(pl.col("price") > 3), seeds=range(2))
        >>> report.ok, report.seeds
        (True, 2)
    """

    job: str
    seeds: int = 0
    """The number of runs."""
    long: int = 0
    """Runs that had not finished; nothing is known about them."""
    rows: int = 0
    seconds: float = 0.0
    """The time of the runs."""
    total_s: float = 0.0
    """The time including the search for the cause of a failure."""
    seed: int | None = None
    """The seed that failed; None: it was the reference run itself, or all runs passed."""
    kind: str = ""
    found: list[str] = field(default_factory=list)
    """The differences, as lines for display."""
    schedule: str = ""
    rows_needed: Mapping[str, int] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    warnings: list[str] = field(default_factory=list)
    cut: Mapping[str, int] = field(default_factory=dict)
    """Sources that have more rows than were read, by uid, with the number read."""
    late: tuple[str, ...] = ()
    """The uids of windows whose late rows the job uses."""
    replay: str = ""

    @property
    def ok(self) -> bool:
        """Whether no run differs from the reference run."""
        return not self.kind

    @property
    def text(self) -> str:
        """What was run and, if a run differs, how: the rows, the failure that led there, and where in the job's code to
        look.
        """
        return "\n".join(self._lines())

    def _lines(self) -> Iterable[str]:
        per_run = f", {1000 * self.seconds / self.seeds:.0f} ms each" if self.seeds else ""
        ran = f"{counted(self.seeds, 'run')} over {counted(self.rows, 'row')}{per_run}"
        if self.ok:
            yield f"{self.job}: the output with failures equals the output without: {ran}"
            if self.long:
                its = "its" if self.long == 1 else "their"
                yield f"{self.long:,} of the runs had not reached {its} end after as many steps as a run has"
        else:
            yield f"{self.job}: {self._headline()} (found after {ran})"
            yield from self.found
            if self.schedule:
                yield f"Schedule: {self.schedule}"
            if self.rows_needed:
                yield "Rows: " + ", ".join(
                    f"the first row of {uid!r}" if n == 1 else f"the first {n} rows of {uid!r}"
                    for uid, n in self.rows_needed.items()
                )
            if self.diagnosis is not None:
                yield from self.diagnosis.lines()
            if self.replay and self.seed is not None:
                yield f"Replay: {self.replay} --seed {self.seed}"
        if self.cut:
            read = ", ".join(f"{counted(rows, 'row')} of {uid!r}" for uid, rows in self.cut.items())
            yield f"Not tried: what comes after the first {read} (--rows-max N reads more, --rows UID=FILE others)"
        if self.late:
            yield (
                f"Late rows of {', '.join(map(repr, self.late))} may differ from run to run, as the job reads them: a "
                "run is compared with one without failures in which the same rows are late"
            )
        yield from (f"Warning: {warning}" for warning in self.warnings)

    def _headline(self) -> str:
        seed = "" if self.seed is None else f"seed {self.seed}: "
        match self.kind:
            case "differs":
                return f"{seed}the output is not that of the run without failures"
            case "effect":
                return f"{seed}a function does more outside of the job than in the run without failures"
            case "engine":
                return f"{seed}midstream itself has a bug here, please report it"
            case "fails" if self.seed is None:
                return "the job fails on its own, without any fault"
            case "fails":
                return f"{seed}the job fails, but not because of a simulated fault"
            case _:  # stuck
                return f"{seed}the job does not end, so there is nothing to compare"


@dataclass(slots=True)
class Campaign:
    """Runs the seeds. `parallelisms`: those at which the job runs. `jobs`: the number of processes."""

    name: str
    job: SimulatedJob
    contracts: Mapping[str, Contract]
    parallelisms: Sequence[int]
    jobs: int = 1
    seconds: float | None = None
    replay: str = ""
    progress: Callable[[int], None] = lambda runs: None
    notify: Callable[[str], None] = lambda text: None

    def scenario(self, seed: int) -> JobScenario:
        rows = [recorded.rows for recorded in self.job.inputs.values()]
        return draw(seed, rows, self.parallelisms, not self.job.has_own_parallelism)

    def go(self, seeds: Sequence[int]) -> Report:
        began_s = time.monotonic()
        report = Report(self.name, rows=sum(recorded.rows for recorded in self.job.inputs.values()), replay=self.replay)
        report.late = tuple(self.job.late_outputs)
        report.cut = {uid: recorded.rows for uid, recorded in self.job.inputs.items() if recorded.has_more}
        clues = all_clues(self.job)
        report.warnings = [str(clue) for clue in clues if clue.habit in WARNED]
        reference = run_job(self.job, REFERENCE)
        verdict = judge(self.job, reference, reference, self.contracts)
        again = Verdict() if verdict.kind else judge(self.job, reference, run_job(self.job, REFERENCE), self.contracts)
        if verdict.kind:
            self._failed(report, None, verdict)
        elif again.kind:
            self._explain(report, None, Small(self.job, reference, REFERENCE, again))
        else:
            self._run(report, reference, seeds, clues)
        report.total_s = time.monotonic() - began_s
        return report

    def _run(self, report: Report, reference: Ran, seeds: Sequence[int], clues: Sequence[Clue]) -> None:
        began_s = time.monotonic()
        end_s = None if self.seconds is None else began_s + self.seconds
        if self.jobs > 1 and len(seeds) > 1:
            failing = self._in_processes(report, reference, seeds, end_s)
        else:
            failing = None
            if Habit.SET in {clue.habit for clue in clues}:  # in one process, a set always has the same order
                failing = self._in_processes(report, reference, [], end_s)
            if failing is None:
                failing = self._here(report, reference, seeds, end_s)
        report.seconds = time.monotonic() - began_s
        if failing is None:
            return
        if failing.seed == PROBE:
            self._failed(report, None, Verdict(DIFFERS))
            report.found = failing.lines
            report.schedule = "the reference run again, in another process"
            sets = [clue for clue in clues if clue.habit in (Habit.SET, Habit.HASH)]
            cause = Cause.HASH if all(clue.habit is Habit.HASH for clue in sets) and sets else Cause.SET
            report.diagnosis = Diagnosis(cause, clues=sets)
            return
        scenario = self.scenario(failing.seed)
        verdict = judge(self.job, reference, run_job(self.job, scenario), self.contracts)
        if not verdict.kind:
            report.kind, report.seed, report.found = failing.kind, failing.seed, failing.lines
            report.diagnosis = Diagnosis(Cause.RUN_TO_RUN, clues=list(clues))
            return
        self._explain(report, failing.seed, Small(self.job, reference, scenario, verdict))

    def _here(self, report: Report, reference: Ran, seeds: Sequence[int], end_s: float | None) -> Finished | None:
        with collecting_rarely():
            for seed in seeds:
                if end_s is not None and time.monotonic() >= end_s:
                    break
                done = finished(self.job, reference, self.contracts, seed, self.scenario(seed))
                collect()
                report.seeds += 1
                report.long += done.kind == LONG
                self.progress(report.seeds)
                if done.kind not in ("", LONG):
                    return done
        return None

    def _in_processes(
        self, report: Report, reference: Ran, seeds: Sequence[int], end_s: float | None
    ) -> Finished | None:
        count = min(self.jobs, len(seeds)) or PROBES
        with by_value(own_modules(self.job.logical)):
            data = pickled((self.job, reference.output, reference.effects, self.contracts, self.parallelisms))
        messages: queue.Queue[Finished | str] = queue.Queue()
        workers = [_Worker(number, data, list(seeds[number::count]), messages) for number in range(count)]
        left = count
        failing: Finished | None = None
        try:
            while left:
                outcome = messages.get(timeout=SILENCE_S)
                if isinstance(outcome, str):
                    if outcome:
                        raise ClusterError(f"a process that simulates the job has ended by itself: {outcome}")
                    left -= 1
                    continue
                if outcome.seed != PROBE:
                    report.seeds += 1
                    self.progress(report.seeds)
                report.long += outcome.kind == LONG
                if outcome.kind not in ("", LONG):
                    failing = outcome
                    break
                if end_s is not None and time.monotonic() >= end_s:
                    break
        except queue.Empty:
            raise ClusterError(f"the processes that simulate the job have been silent for {SILENCE_S:.0f} s") from None
        finally:
            for worker in workers:
                worker.end()
        return failing

    def _failed(self, report: Report, seed: int | None, verdict: Verdict) -> None:
        report.kind, report.seed, report.found = verdict.kind, seed, verdict.lines()

    def _explain(self, report: Report, seed: int | None, small: Small) -> None:
        """Find the smallest schedule, and the cause."""
        self._failed(report, seed, small.verdict)
        if seed is not None:
            self.notify(f"seed {seed} fails: {' '.join(report.found)}; looking for the shortest schedule")
            small = shrink(small, self.contracts)
            report.found = small.verdict.lines()
        report.schedule = small.scenario.describe()
        report.rows_needed = {
            uid: recorded.rows
            for uid, recorded in small.job.inputs.items()
            if recorded.rows < self.job.inputs[uid].rows
        }
        if small.verdict.kind == EFFECT:
            report.diagnosis = Diagnosis(
                Cause.EFFECT, clues=[clue for clue in all_clues(self.job) if clue.habit is Habit.EFFECT]
            )
        elif small.verdict.kind in (DIFFERS, FAILS):
            report.diagnosis = diagnose(self.job, self.contracts, self.parallelisms, small.scenario, self.notify)
        assert small.verdict.kind != ENGINE or report.diagnosis is None


def finished(
    job: SimulatedJob, reference: Ran, contracts: Mapping[str, Contract], seed: int, scenario: JobScenario
) -> Finished:
    verdict = judge(job, reference, run_job(job, scenario), contracts)
    return Finished(seed, verdict.kind, verdict.lines())


class _Worker:
    """A process that runs some of the seeds. `messages` gets its output, and finally "" or what was wrong with it."""

    def __init__(self, number: int, data: bytes, seeds: list[int], messages: queue.Queue[Finished | str]) -> None:
        paths = [path or os.getcwd() for path in sys.path]
        environment = {**os.environ, "PYTHONHASHSEED": str(1 + number), "PYTHONPATH": os.pathsep.join(paths)}
        environment["POLARS_MAX_THREADS"] = "1"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "midstream.testing.simulation.worker_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        self._messages = messages
        self._is_ended = False
        threading.Thread(target=self._feed, args=(data, seeds), daemon=True).start()
        threading.Thread(target=self._read_results, daemon=True).start()

    def _feed(self, data: bytes, seeds: list[int]) -> None:
        stream = self._process.stdin
        assert stream is not None
        try:
            for part in (data, msgspec.json.encode(seeds)):
                stream.write(len(part).to_bytes(8, "big"))
                stream.write(part)
            stream.close()
        except BrokenPipeError:
            pass  # the process has ended, and its status gives the reason

    def _read_results(self) -> None:
        stream: BinaryIO | None = self._process.stdout  # type: ignore[assignment]
        assert stream is not None
        wrong = ""
        try:
            while line := stream.readline(LINE_BYTES_MAX):
                self._messages.put(msgspec.json.decode(line, type=Finished))
        except msgspec.DecodeError as error:
            wrong = f"it has printed something that is not a result: {error}"
        status = self._process.wait()
        if not wrong and status and not self._is_ended:
            wrong = f"exit status {status}; its output is above"
        self._messages.put(wrong)

    def end(self) -> None:
        self._is_ended = True
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
