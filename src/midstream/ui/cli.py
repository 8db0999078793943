"""The command line: parse, do one thing, print it for people or (`--json`) for machines.

Exit status: 0 it went well, 1 the job or the request failed, 2 the input was bad, 70 a bug in midstream, 75 what the
job runs on has ended or is not there, 128 + n after signal n.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, TextIO

import cyclopts
from cyclopts import App, Parameter
from rich.console import Console

from midstream.core.errors import ConfigError, MidstreamError
from midstream.ui.answer import Answer, Exit, Stream, print_answer, print_stream, stdout_kept_for_the_answer
from midstream.ui.failures import print_error, print_midstream_error
from midstream.ui.parameters import Json, whole_number
from midstream.ui.simulate_command import simulate
from midstream.ui.supervising import Supervised, supervise_driver

app = App(
    name="midstream",
    help="A stateful stream processor for Python that runs on Spark.",
    version_flags=["--version"],
    result_action="return_value",
    help_format="markdown",
    suppress_keyboard_interrupt=False,
)


def _version() -> str:
    import midstream

    return f"midstream {midstream.__version__}"


app.version = _version


@app.command
def run(
    job: Path,
    /,
    *,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    master: str | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    allow_dropped_state: bool = False,
    newer_output: Literal["take-back", "keep"] | None = None,
    fresh: Annotated[bool, Parameter(negative=())] = False,
    resume: Annotated[bool, Parameter(negative=())] = False,
    supervise: Annotated[bool, Parameter(negative=())] = False,
    checkpoint_dir: str | None = None,
    aligned_timeout: str | None = None,
    py_files: str | None = None,
    slots: str | None = None,
    page: str | None = None,
    preview: Annotated[int | None, Parameter(converter=whole_number)] = None,
    json: Json = False,
) -> Answer | Supervised:
    """Run the job in a Python file until it ends, and show it live.

    The file makes one Environment. Ctrl-C stops the job at a checkpoint; twice leaves at once.

    Parameters
    ----------
    job
        The Python file.
    parallelism
        Subtasks per operator, where the job does not say otherwise.
    master
        Spark master URL, such as local[4] or spark://host:7077. Default: local[*].
    from_
        Go on from a checkpoint: its number or path, "latest" of the checkpoint directory, or the path of
        a savepoint.
    allow_dropped_state
        Go on even if the checkpoint has state of operators that the job no longer has.
    newer_output
        What becomes of output that is newer than the checkpoint given by --from: "take-back" has the
        sinks remove it, "keep" leaves it, and its rows are there twice.
    fresh
        Start over, although the checkpoint directory has completed checkpoints. They are deleted only
        when the new job has one of its own.
    resume
        Go on from the newest checkpoint, or begin if none has been completed yet. For what starts the job
        again without being asked, such as systemd and Kubernetes.
    supervise
        Start the job as --resume does, and again when its process is killed or crashes, or what it runs on
        ends; not when the job has finished, failed, or been stopped. At most 10 times within 10 minutes.
    checkpoint_dir
        Where checkpoints go: a directory or a storage URL.
    aligned_timeout
        How long a checkpoint waits behind rows in flight before it overtakes and stores them, such as
        "1 s"; 0 for at once.
    py_files
        Python files, packages' directories and zips that the job imports, separated by commas: for the job's
        file, and for the slots besides what they are sent in any case.
    slots
        "spark": on Spark (the default); "process": on plain processes of this machine, without Spark and Java.
    page
        Where the job's page is served: a port of this machine (the default, 0, is any free one), HOST:PORT for one
        that other machines reach, or "off". MIDSTREAM_PAGE sets another default.
    preview
        Show so many rows of each stream that the job ends with, within about a second, and start nothing:
        no Spark, no slots, no checkpoints, and nothing is written.
    """
    from midstream.ui.running import Overrides, check_resume, run_job

    overrides = Overrides(
        parallelism,
        master,
        from_,
        allow_dropped_state,
        checkpoint_dir,
        aligned_timeout,
        newer_output=newer_output,
        fresh=fresh,
        resume=resume or supervise,
        py_files=py_files,
        slots=slots,
        page=page,
    )
    if preview is not None:
        from midstream.ui.previewing import preview_job

        return preview_job(job, preview, overrides)
    if supervise:
        check_resume(overrides)
        return Supervised()
    return run_job(job, overrides, json)


@app.command
def new(name: str, /, *, json: Json = False) -> Answer:
    """Write a job to begin with, its test and a README, into a new directory.

    Parameters
    ----------
    name
        Of the directory and of the job: letters, digits and underscores.
    """
    from midstream.ui.beginning import begin_job

    return begin_job(name)


@app.command(name="list")
def list_(*, all_: Annotated[bool, Parameter(name="--all", negative=())] = False, json: Json = False) -> Answer:
    """List the jobs that run on this machine under this user.

    Parameters
    ----------
    all_
        Also those that have ended: the newest 100 that this user has started.
    """
    from midstream.ui.remote import list_jobs

    return list_jobs(all_)


@app.command
def status(job: str | None = None, /, *, json: Json = False) -> Answer:
    """Show one job: operators, watermarks, checkpoints, failures.

    Parameters
    ----------
    job
        Its id, the beginning of its id, its name, or the link to its page (see `midstream page`), also from another
        machine; not needed when only one job runs here.
    """
    from midstream.ui.remote import show_status

    return show_status(job)


@app.command
def top(
    job: str | None = None,
    /,
    *,
    json: Annotated[bool, Parameter(name="--json", negative=(), help="Print a status on each line.")] = False,
) -> Answer | Stream:
    """Watch one job until it ends or Ctrl-C: rates, the bottleneck, watermarks, checkpoints. The job runs on.

    Parameters
    ----------
    job
        Its id, the beginning of its id, its name, or the link to its page (see `midstream page`), also from another
        machine; not needed when only one job runs here.
    """
    from midstream.ui.remote import watch

    return watch(job, json)


@app.command
def logs(
    job: str | None = None,
    /,
    *,
    follow: Annotated[bool, Parameter(negative=())] = False,
    operator: str | None = None,
    json: Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object per line.")] = False,
) -> Stream:
    """Print what the job's functions have printed and logged in its slots, as far back as the driver keeps it.

    Parameters
    ----------
    job
        Its id, the beginning of its id, its name, or the link to its page (see `midstream page`), also from another
        machine; not needed when only one job runs here.
    follow
        Go on until the job ends.
    operator
        Only of this operator, by its name or uid.
    """
    from midstream.ui.remote import show_logs

    return show_logs(job, follow, operator)


@app.command
def rows(
    job: str, operator: str, /, *, count: Annotated[int, Parameter(name=["-n", "--rows"])] = 20, json: Json = False
) -> Answer:
    """Show the next rows that an operator of a running job gives out; of a sink, the rows that it takes in.

    Parameters
    ----------
    job
        Its id, the beginning of its id, its name, or the link to its page (see `midstream page`), also from another
        machine.
    operator
        The operator's uid, or its name where only one has it.
    count
        How many rows at most, 1 to 100. They are of one batch: fewer come where that has fewer.
    """
    from midstream.ui.live_rows import show_rows

    return show_rows(job, operator, count)


@app.command
def history(job: str, /, *, json: Json = False) -> Answer:
    """Show the last that is known of a job: how it ended, its figures, checkpoints and failures.

    Parameters
    ----------
    job
        Its id, the beginning of its id, or its name: then the newest of that name.
    """
    from midstream.ui.remote import show_history

    return show_history(job)


@app.command
def page(job: str, /, *, at: Annotated[str | None, Parameter(name="--page")] = None, json: Json = False) -> Stream:
    """Print the link to the page of a running job; serve the page of one that has ended, until Ctrl-C.

    Parameters
    ----------
    job
        Its id, the beginning of its id, or its name.
    at
        Where the page of a job that has ended is served: a port of this machine (the default, 0, is any free one), or
        HOST:PORT for one that other machines reach.
    """
    from midstream.ui.remote import serve_page

    return serve_page(job, at)


@app.command
def checkpoint(job: str | None = None, /, *, json: Json = False) -> Answer:
    """Make a checkpoint now and print its path.

    Parameters
    ----------
    job
        Its id, the beginning of its id, its name, or the link to its page (see `midstream page`), also from another
        machine; not needed when only one job runs here.
    """
    from midstream.ui.remote import make_checkpoint

    return make_checkpoint(job, json)


@app.command
def savepoint(job: str, directory: str | None = None, /, *, json: Json = False) -> Answer:
    """Make a savepoint and print its path: a checkpoint that holds all it needs, may be moved, and is never deleted.

    It waits for the rows in flight, however long aligned_timeout is: under backpressure that may take a while.
    The job runs on meanwhile. While it is being restarted the savepoint waits until it runs again; if the
    job fails in the midst of it, no savepoint is made: ask again.

    Parameters
    ----------
    job
        Its id, the beginning of its id, its name, or the link to its page (see `midstream page`), also from another
        machine.
    directory
        Where to make it, a directory or a storage URL; empty, or not there yet. Default: below the
        job's checkpoint directory.
    """
    from midstream.ui.remote import make_savepoint

    return make_savepoint(job, directory, json)


@app.command
def stop(
    job: str | None = None,
    /,
    *,
    drain: Annotated[bool, Parameter(negative=())] = False,
    savepoint: str | None = None,
    json: Json = False,
) -> Answer:
    """Stop a job at a checkpoint from which it can go on. If that cannot be made, it runs on.

    Parameters
    ----------
    job
        Its id, the beginning of its id, its name, or the link to its page (see `midstream page`), also from another
        machine; not needed when only one job runs here.
    drain
        End the sources instead and let everything flow out: windows fire, the job finishes.
    savepoint
        Stop with a savepoint in this directory or at this storage URL; empty, or not there yet. It waits
        for the rows in flight: under backpressure that may take a while.
    """
    from midstream.ui.remote import stop_job

    return stop_job(job, drain, savepoint, json)


@app.command
def rescale(
    job: str | None = None,
    /,
    *,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    json: Json = False,
) -> Answer:
    """Go on at another parallelism: a checkpoint, then from exactly there, rows in flight included.

    If anything is in the way, the job runs on as it was.

    Parameters
    ----------
    job
        Its id, the beginning of its id, its name, or the link to its page (see `midstream page`), also from another
        machine; not needed when only one job runs here.
    parallelism
        Of the operators whose parallelism the job does not set.
    """
    if parallelism is None:
        raise ConfigError(
            "say at which parallelism the job is to go on, for example: midstream rescale --parallelism 4"
        )
    from midstream.ui.remote import rescale_job

    return rescale_job(job, parallelism, json)


@app.command
def inspect(checkpoint: str, /, *, json: Json = False) -> Answer:
    """Show what is in a checkpoint or a savepoint, and verify every checksum.

    Parameters
    ----------
    checkpoint
        A checkpoint (chk-N), a savepoint, or a job's checkpoint directory: then its latest checkpoint.
    """
    from midstream.ui.inspecting import inspect_checkpoint

    return inspect_checkpoint(checkpoint)


@app.command
def doctor(
    job: Path | None = None,
    /,
    *,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    master: str | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    fresh: Annotated[bool, Parameter(negative=())] = False,
    checkpoint_dir: str | None = None,
    py_files: str | None = None,
    slots: str | None = None,
    json: Json = False,
) -> Answer:
    """Look for what would fail later, before a job is started, and say what to change. No job is run.

    Starts a process on each core that the job needs, as a job does, and looks at the versions, clocks and
    connections of all, and whether each can use the checkpoint directory.

    Parameters
    ----------
    job
        The Python file of a job. Without one, only its surroundings are looked at.
    parallelism
        Subtasks per operator; without a job, how many slots to look for.
    master
        Spark master URL, as for `midstream run`.
    from_
        Where the job would go on from, as for `midstream run`.
    fresh
        The job would start over, as for `midstream run`.
    checkpoint_dir
        Where checkpoints would go: a directory or a storage URL.
    py_files
        As for `midstream run`.
    slots
        "process": look at this machine only, without Spark and Java.
    """
    from midstream.ui.doctor import run_doctor
    from midstream.ui.running import Overrides, check_slots

    check_slots(slots)
    overrides = Overrides(
        parallelism, master, from_, checkpoint_dir=checkpoint_dir, fresh=fresh, py_files=py_files, slots=slots
    )
    return run_doctor(job, overrides, json)


@app.command
def bench(
    name: str,
    /,
    *,
    events: Annotated[int | None, Parameter(converter=whole_number)] = None,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    keys: Annotated[int | None, Parameter(converter=whole_number)] = None,
    columns: Annotated[int | None, Parameter(converter=whole_number)] = None,
    rate: Annotated[int | None, Parameter(converter=whole_number)] = None,
    query: str | None = None,
    backlog: Annotated[int | None, Parameter(converter=whole_number)] = None,
    slots: str = "spark",
    json: Json = False,
) -> Answer:
    """Measure: window, udf, keyed_process, strings, sliding, exchange, latency, checkpoint, recovery, nexmark, or simulate.

    Parameters
    ----------
    name
        Which benchmark.
    events
        How many events; fewer than the benchmark's own number make it quicker, not comparable.
    parallelism
        Slots, and subtasks of each operator (2). Not of latency, checkpoint and recovery.
    keys
        Of window (10,000) and sliding (1,000,000).
    columns
        Of window: how many are added up (1).
    rate
        Of latency: rows per second (20,000).
    query
        Of nexmark: q0, q1, q2, q3, q4, q5, q7 or q8; by default all, one after the other.
    backlog
        Of recovery: MiB in flight when the job fails (256).
    slots
        "spark": slots on an embedded Spark session; "process": plain processes, without a JVM.
    """
    from midstream.ui.benching import run_bench

    given = {"events": events, "parallelism": parallelism, "keys": keys, "columns": columns, "rate": rate}
    return run_bench(name, slots, json, {**given, "query": query, "backlog": backlog})


app.command(simulate)


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point; returns the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    json = "--json" in arguments
    errors = Console(stderr=True, highlight=False)
    log_to_stderr()
    try:
        if not json:
            return _answer(arguments, json, sys.stdout, errors)
        with stdout_kept_for_the_answer() as stdout:
            return _answer(arguments, json, stdout, errors)
    except BrokenPipeError:  # `midstream list | head`: nobody reads any more
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Exit.OK
    except KeyboardInterrupt as interruption:
        print_error(errors, "interrupted")
        return 128 + getattr(interruption, "number", signal.SIGINT)
    except Exception:  # noqa: BLE001 - shown as Python shows it; its exit status 1 would say that the job has failed
        traceback.print_exc()
        return Exit.BROKEN


def log_to_stderr() -> None:
    """Warnings, and nothing of what py4j has to say when a Ctrl-C interrupts it. Nothing if logging is set up."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    handler.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], KeyboardInterrupt)))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])


def _answer(arguments: list[str], json: bool, stdout: TextIO, errors: Console) -> int:
    try:
        answer = app(arguments, exit_on_error=False, print_error=False)
    except cyclopts.CycloptsError as error:
        problem = _usage_problem(error, arguments)
        print_error(errors, problem, f"{_command_of(arguments)} --help")
        return _refused(problem, json, stdout)
    except MidstreamError as error:
        exit_status = print_midstream_error(errors, error)
        _refused(str(error), json, stdout)
        return exit_status
    if isinstance(answer, Supervised):
        return supervise_driver(arguments, stdout if json else None)
    if isinstance(answer, Stream):
        try:
            print_stream(answer, json, stdout)
        except MidstreamError as error:
            exit_status = print_midstream_error(errors, error)
            _refused(str(error), json, stdout)
            return exit_status
        return Exit.OK
    if isinstance(answer, Answer):  # else it was --help or --version, already printed
        print_answer(answer, json, stdout)
        return answer.exit
    return Exit.OK


def _refused(problem: str, json: bool, stdout: TextIO) -> int:
    if json:
        print_answer(Answer({"error": problem}, ""), json, stdout)
    return Exit.BAD_INPUT


def _command_of(arguments: list[str]) -> str:
    known = bool(arguments) and arguments[0] in app
    return f"midstream {arguments[0]}" if known else "midstream"


def _usage_problem(error: cyclopts.CycloptsError, arguments: list[str]) -> str:
    """What cyclopts says, in our words where its own would puzzle."""
    if isinstance(error, cyclopts.UnusedCliTokensError):
        extra = " ".join(error.unused_tokens or [])
        return f"{_command_of(arguments)} takes no further argument: {extra}"
    if isinstance(error, cyclopts.UnknownCommandError) and arguments[0].startswith("-"):
        close = get_close_matches(arguments[0], ["--help", "--version"], n=1)
        return f"Unknown option: {arguments[0]}." + (f" Did you mean {close[0]}?" if close else "")
    return str(error)
