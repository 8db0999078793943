"""`midstream run`: loads a job file, starts the job, follows it to its end, and reports the result."""

from __future__ import annotations

import logging
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console, Group, RenderableType
from rich.text import Text

from midstream.cli import formatting
from midstream.cli.error_text import exit_after, print_error, print_job_failure
from midstream.cli.follow import Interrupts, display, ending_at_a_signal, follow
from midstream.cli.json_types import RanJob
from midstream.cli.output import SLOTS, Answer, Exit, busy_with
from midstream.cli.parameters import module_paths
from midstream.cli.status_tables import job_view
from midstream.cli.supervisor import end_with_the_supervisor
from midstream.engine.checkpoint.store import FencedError
from midstream.engine.core.errors import ConfigError, InvariantError, MidstreamError
from midstream.engine.protocol.job_status import JobStatus
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.process.slot_provider import SlotProvider

if TYPE_CHECKING:
    from midstream.api.environment import Environment
    from midstream.api.submit import StartOptions


@dataclass(frozen=True, slots=True)
class Overrides:
    """Options of the command line that override the job file; None: as the file sets it."""

    start: StartOptions
    py_files: str | None = None
    slots: str | None = None
    page: str | None = None

    @property
    def arguments(self) -> list[str]:
        """Return the options as they were given, except where to start from."""
        named = (
            ("--parallelism", self.start.parallelism),
            ("--master", self.start.master),
            ("--checkpoint-dir", self.start.checkpoint_dir),
            ("--aligned-timeout", self.start.aligned_timeout),
            ("--py-files", self.py_files),
            ("--slots", self.slots),
            ("--page", self.page),
        )
        return [item for name, value in named if value is not None for item in (name, str(value))]

    @property
    def modules(self) -> list[str]:
        return module_paths(self.py_files)

    @property
    def of_a_run(self) -> list[str]:
        """Return the names of given options that concern how a job runs, and not what it is."""
        flags = (
            ("--from", self.start.restore_from),
            ("--newer-output", self.start.newer_output),
            ("--allow-dropped-state", self.start.allow_dropped_state or None),
            ("--fresh", self.start.fresh or None),
            ("--resume", self.start.resume or None),
        )
        names = [name for name in self.arguments[::2] if name != "--py-files"]
        return names + [name for name, value in flags if value is not None]


TAKEN_OVER: Final = "the newer start runs the job: there is nothing to do here"


def run_job(path: Path, overrides: Overrides, json: bool) -> Answer:
    """Run a job. Raises MidstreamError if it cannot be started; a job that fails later is an answer."""
    end_with_the_supervisor()
    errors = Console(stderr=True, highlight=False)
    provider = _provider(overrides.slots)
    options = replace(overrides.start, slots=provider)
    submission = load_with_its_own_logging(path, overrides.modules).submission(options)
    if submission.resumption:
        errors.print(formatting.printable(submission.resumption), markup=False, soft_wrap=True)
    what = "starting Spark and the job's slots" if provider is None else "starting the job's slots"
    with ending_at_a_signal(), busy_with(what, silent=json):
        job = submission.start(overrides.page)
    if job.page is not None and not json:
        errors.print(f"page: {job.page}", markup=False, soft_wrap=True)
    interrupts = Interrupts()
    with interrupts.installed():
        with display(errors, silent=json) as screen, job.awaited():
            last = follow(job, screen, interrupts)
        again = shlex.join(["midstream", "run", str(path), *overrides.arguments, "--from", "latest"])
        if last.state == "failed":
            error = _error_of(job)
            why = _why(error, last)
            taken_over = isinstance(error, FencedError)  # to resume here would take the job away from that start
            print_job_failure(errors, last, why, TAKEN_OVER if taken_over else _how_to_go_on(last, again))
            return Answer(RanJob.of(last, why), "", exit_after(error))
        if not last.has_ended:
            job.cancel("it could not be stopped cleanly")
            problem = f"{last.name}: ended without a last checkpoint"
            print_error(errors, problem, _how_to_go_on(last, again))
            return Answer(RanJob.of(last, problem), "", 128 + interrupts.last_signal)
        summary = _summary(last, again)
        view: RenderableType = summary if errors.is_terminal else Group(job_view(last, shows_failures=False), summary)
        return Answer(last, view, 128 + interrupts.last_signal if interrupts.count else Exit.OK)


def load_with_its_own_logging(path: Path, py_files: list[str]) -> Environment:
    """Load a job with the logging that its file sets up, as when Python runs it; otherwise warnings go to stderr."""
    from midstream.api.job_file import load_job
    from midstream.cli.error_text import log_to_stderr

    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        return load_job(path, py_files)
    finally:
        if not root.handlers:
            root.handlers = before
            log_to_stderr()


def check_resume(options: StartOptions) -> None:
    """Raise ConfigError for options that cannot be repeated each time a driver is started again."""
    given = {"--from": options.restore_from, "--newer-output": options.newer_output, "--fresh": options.fresh or None}
    for option, value in given.items():
        if value is not None:
            raise ConfigError(
                f"--supervise starts the job as --resume does: it resumes from the newest checkpoint, or begins if "
                "there is none; "
                f"leave {option} out, or start the job once with {option} and stop it when it has completed a checkpoint"
            )


def check_slots(slots: str | None) -> None:
    """Raise ConfigError for an unknown value of --slots."""
    if slots not in (None, *SLOTS):
        raise ConfigError(f"--slots: {slots!r} is not one of {', '.join(SLOTS)}")


def _provider(slots: str | None) -> SlotProvider | None:
    """Return the provider of slots; None: Spark's. Raises ConfigError for an unknown one."""
    check_slots(slots)
    return ProcessSlots() if slots == "process" else None


def _error_of(job: Job) -> MidstreamError:
    """Return the error with which the job has failed."""
    try:
        job.wait()
    except MidstreamError as error:
        return error
    raise InvariantError(f"job {job.name} failed without an error")


def _why(error: MidstreamError, status: JobStatus) -> str:
    """Describe why the job was not restarted any more, and its last failure. Raises the error of a job that never ran."""
    if not status.failures:  # the request was wrong, not the run
        raise error
    if status.restarts:
        return str(error).partition("\n\nTraceback (most recent call last)")[0]  # which is shown above it
    return status.failures[0].summary


def _summary(status: JobStatus, again: str) -> Text:
    took = formatting.span(max(0, status.now_ms - status.started_ms) / 1e3)
    line = Text(f"{formatting.printable(status.name)} {status.state}", style="bold")
    line.append(f": {formatting.rows(status.rows_read)} rows read in {took}", style="not bold")
    if status.restarts:
        times = "1 restart" if status.restarts == 1 else f"{status.restarts} restarts"
        line.append(f", {times}, after which rows are read again and counted again", style="not bold")
    if status.had_finished:
        line.append(
            f"\nit had finished before, in {formatting.printable(status.restored_from or '')}, so nothing was run; to run it "
            "again, start it with --fresh",
            style="not bold",
        )
    if status.state == "stopped":
        line.append(f"\n{_how_to_go_on(status, again)}", style="not bold")
    return line


def _how_to_go_on(status: JobStatus, again: str) -> str:
    if status.checkpoint_dir is None:
        return "there is nothing to resume from: the job has no checkpoint directory (--checkpoint-dir)"
    if not status.checkpoints_completed and status.restored_from is None:
        return "there is nothing to resume from: no checkpoint was completed"
    return f"resume with: {again}"
