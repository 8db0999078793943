"""`midstream run`: load a job file, start it, follow it to its end, say how it went."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console, Group, RenderableType
from rich.text import Text

from midstream.protocol.messages import JobStatus
from midstream.ui import text
from midstream.ui.answer import Answer, Exit, busy_with
from midstream.ui.failures import print_error, print_job_failure
from midstream.ui.follow import Interrupts, display, follow
from midstream.ui.tables import job_view, rows_read


@dataclass(frozen=True, slots=True)
class Overrides:
    """What the command line says over the job file; None: as the file says."""

    parallelism: int | None = None
    master: str | None = None
    restore: str | None = None
    allow_dropped_state: bool = False
    checkpoint_dir: str | None = None
    aligned_timeout: str | None = None
    newer_output: Literal["take-back", "keep"] | None = None
    fresh: bool = False

    @property
    def arguments(self) -> list[str]:
        """As they were given, but for where to start from."""
        named = (
            ("--parallelism", self.parallelism),
            ("--master", self.master),
            ("--checkpoint-dir", self.checkpoint_dir),
            ("--aligned-timeout", self.aligned_timeout),
        )
        return [item for name, value in named if value is not None for item in (name, str(value))]


def run_job(path: Path, overrides: Overrides, json: bool) -> Answer:
    """Raises MidstreamError when the job cannot be started; a job that fails later is an answer."""
    from midstream.api.loading import load_job

    errors = Console(stderr=True, highlight=False)
    environment = load_job(path)
    with busy_with("starting Spark and the job's slots", silent=json):
        job = environment.start(
            parallelism=overrides.parallelism,
            master=overrides.master,
            restore_from=overrides.restore,
            allow_dropped_state=overrides.allow_dropped_state,
            newer_output=overrides.newer_output,
            fresh=overrides.fresh,
            checkpoint_dir=overrides.checkpoint_dir,
            aligned_timeout=overrides.aligned_timeout,
        )
    if job.checkpoint_dir is not None and not json:
        errors.print(f"checkpoints in {text.printable(job.checkpoint_dir)}", markup=False, soft_wrap=True)
    interrupts = Interrupts()
    with interrupts.installed():
        with display(errors, silent=json) as screen:
            last = follow(job, screen, interrupts)
        again = shlex.join(["midstream", "run", str(path), *overrides.arguments, "--from", "latest"])
        if last.state == "failed":
            if not last.failures:  # it never ran: a matter of what was asked, not of how it went
                job.wait()
            print_job_failure(errors, last, _how_to_go_on(last, again))
            return Answer(last, "", Exit.JOB_FAILED)
        if not last.has_ended:
            job.cancel("it could not be stopped cleanly")
            print_error(errors, f"{last.name}: ended without a last checkpoint", _how_to_go_on(last, again))
            return Answer(last, "", 128 + interrupts.last_signal)
        summary = _summary(last, again)
        view: RenderableType = summary if errors.is_terminal else Group(job_view(last), summary)
        return Answer(last, view, 128 + interrupts.last_signal if interrupts.count else Exit.OK)


def _summary(status: JobStatus, again: str) -> Text:
    took = text.span((status.now_ms - status.started_ms) / 1e3)
    line = Text(f"{text.printable(status.name)} {status.state}", style="bold")
    line.append(f": {text.rows(rows_read(status))} rows read in {took}", style="not bold")
    if status.restarts:
        times = "1 restart" if status.restarts == 1 else f"{status.restarts} restarts"
        line.append(f", {times}, after which rows are read again and counted again", style="not bold")
    if status.had_finished:
        line.append(
            f"\nit had finished before, in {text.printable(status.restored_from or '')}, so nothing was run; to run it "
            "again, start it with --fresh",
            style="not bold",
        )
    if status.state == "stopped":
        line.append(f"\n{_how_to_go_on(status, again)}", style="not bold")
    return line


def _how_to_go_on(status: JobStatus, again: str) -> str:
    if status.checkpoint_dir is None:
        return "there is nothing to go on from: the job has no checkpoint directory (--checkpoint-dir)"
    if not status.checkpoints_completed and status.restored_from is None:
        return "there is nothing to go on from: no checkpoint was completed"
    return f"go on with: {again}"
