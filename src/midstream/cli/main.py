"""The command line: parse, do one thing, print it for users or (`--json`) for programs.

Exit status: 0 for success, 1 if the job or the request failed, 2 for invalid input, 70 for a bug in midstream, 75 if
what the job runs on has ended or is not available, 128 + n after signal n.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, TextIO

import cyclopts
from cyclopts import App, Group, Parameter
from rich.console import Console

from midstream.cli.error_text import log_to_stderr, print_error, print_midstream_error
from midstream.cli.output import Answer, Exit, Stream, print_answer, print_stream, stdout_kept_for_the_answer
from midstream.cli.parameters import Job, Json, OptionalJob, module_paths, refuse, whole_number
from midstream.cli.supervisor import Supervised, supervise_driver
from midstream.engine.core.errors import ConfigError, MidstreamError

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
OF_A_TRACE = Group("Options for the trace of one run", sort_key=2)


@app.command
def run(  # noqa: PLR0913 - one flag each
    job: Path,
    /,
    *,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    master: str | None = None,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    allow_dropped_state: bool = False,
    newer_output: Literal["rollback", "keep"] | None = None,
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

    The file makes one Environment. Ctrl-C stops the job at a checkpoint; twice leaves immediately.

    Parameters
    ----------
    job
        The Python file.
    parallelism
        Subtasks per operator, unless the job sets another number.
    master
        Spark master URL, such as local[4] or spark://host:7077. Default: local[*].
    from_
        Resume from a checkpoint: its number or path, "latest" of the checkpoint directory, or the path of
        a savepoint.
    allow_dropped_state
        Resume even if the checkpoint has state that the job no longer has.
    newer_output
        What to do with output that is newer than the checkpoint given by --from: "rollback" makes the
        sinks remove it; "keep" leaves it, so that its rows are duplicated.
    fresh
        Start over, even if the checkpoint directory has completed checkpoints. They are deleted only
        when the new job has completed one of its own.
    resume
        Resume from the newest checkpoint, or begin if none has been completed yet. For supervisors that
        restart the job, such as systemd and Kubernetes.
    supervise
        Start the job as --resume does, and again when its process is killed or crashes, or what it runs on
        ends; not when the job has finished, failed, or been stopped. At most 10 times within 10 minutes.
    checkpoint_dir
        Where checkpoints go: a directory or a storage URL.
    aligned_timeout
        How long a checkpoint waits for rows in flight before it overtakes and stores them, such as
        "1 s"; 0 to overtake immediately.
    py_files
        Python files, package directories and zips that the job imports, separated by commas. Slots get them
        in addition to the modules that they get in any case.
    slots
        "spark": run on Spark (the default); "process": on plain processes of this machine, without Spark or Java.
    page
        Where to serve the job's page: a port of this machine (the default, 0, is any free one), HOST:PORT to make
        it reachable from other machines, or "off". MIDSTREAM_PAGE sets another default.
    preview
        Show this many rows of each of the job's final streams, within about a second, and start nothing:
        no Spark, no slots, no checkpoints, and nothing is written.
    """
    from midstream.api.submit import StartOptions
    from midstream.cli.commands.run import Overrides, check_resume, run_job

    start = StartOptions(
        parallelism=parallelism,
        master=master,
        restore_from=from_,
        allow_dropped_state=allow_dropped_state,
        newer_output=newer_output,
        fresh=fresh,
        resume=resume or supervise,
        checkpoint_dir=checkpoint_dir,
        aligned_timeout=aligned_timeout,
    )
    overrides = Overrides(start, py_files, slots, page)
    if preview is not None:
        from midstream.cli.commands.preview import preview_job

        return preview_job(job, preview, overrides)
    if supervise:
        check_resume(start)
        return Supervised()
    return run_job(job, overrides, json)


@app.command
def new(name: str, /, *, json: Json = False) -> Answer:
    """Create a directory with a first job, its test and a README.

    Parameters
    ----------
    name
        The name of the directory and of the job: letters, digits and underscores.
    """
    from midstream.cli.commands.new import create_project

    return create_project(name)


@app.command(name="list")
def list_(*, all_: Annotated[bool, Parameter(name="--all", negative=())] = False, json: Json = False) -> Answer:
    """List the jobs that run on this machine under this user.

    Parameters
    ----------
    all_
        Include jobs that have ended: the newest 100 that this user has started.
    """
    from midstream.cli.commands.job_commands import list_jobs

    return list_jobs(all_)


@app.command
def status(job: OptionalJob = None, /, *, json: Json = False) -> Answer:
    """Show one job: operators, watermarks, checkpoints, failures."""
    from midstream.cli.commands.job_commands import show_status

    return show_status(job)


@app.command
def top(
    job: OptionalJob = None,
    /,
    *,
    json: Annotated[bool, Parameter(name="--json", negative=(), help="Print a status on each line.")] = False,
) -> Answer | Stream:
    """Watch one job until it ends or Ctrl-C: rates, the bottleneck, watermarks, checkpoints. The job runs on."""
    from midstream.cli.commands.job_commands import watch

    return watch(job, json)


@app.command
def logs(
    job: OptionalJob = None,
    /,
    *,
    follow: Annotated[bool, Parameter(negative=())] = False,
    operator: str | None = None,
    json: Annotated[bool, Parameter(name="--json", negative=(), help="Print one JSON object per line.")] = False,
) -> Stream:
    """Print what the job's functions have printed and logged in its slots, as far back as the driver keeps it.

    Parameters
    ----------
    follow
        Continue until the job ends.
    operator
        Show only lines of this operator, by its name or uid.
    """
    from midstream.cli.commands.job_commands import show_logs

    return show_logs(job, follow, operator)


@app.command
def rows(
    job: Job, operator: str, /, *, count: Annotated[int, Parameter(name=["-n", "--rows"])] = 20, json: Json = False
) -> Answer:
    """Show the next rows that an operator of a running job emits or, for a sink, receives.

    Parameters
    ----------
    operator
        The operator's uid, or its name if only one has it.
    count
        The largest number of rows, 1 to 100. They are from one batch, which may have fewer.
    """
    from midstream.cli.commands.rows import show_rows

    return show_rows(job, operator, count)


@app.command
def history(job: str, /, *, json: Json = False) -> Answer:
    """Show the last known status of a job: how it ended, its figures, checkpoints and failures.

    Parameters
    ----------
    job
        The job's id, the beginning of its id, or its name, which means the newest job of that name.
    """
    from midstream.cli.commands.job_commands import show_history

    return show_history(job)


@app.command
def page(job: str, /, *, at: Annotated[str | None, Parameter(name="--page")] = None, json: Json = False) -> Stream:
    """Print the link to the page of a running job; serve the page of one that has ended, until Ctrl-C.

    Parameters
    ----------
    job
        The job's id, the beginning of its id, or its name.
    at
        Where to serve the page of a job that has ended: a port of this machine (the default, 0, is any free one), or
        HOST:PORT to make it reachable from other machines.
    """
    from midstream.cli.commands.job_commands import serve_page

    return serve_page(job, at)


@app.command
def checkpoint(job: OptionalJob = None, /, *, json: Json = False) -> Answer:
    """Make a checkpoint now and print its path."""
    from midstream.cli.commands.job_commands import make_checkpoint

    return make_checkpoint(job, json)


@app.command
def savepoint(job: Job, directory: str | None = None, /, *, json: Json = False) -> Answer:
    """Make a savepoint and print its path: a checkpoint that holds all it needs, may be moved, and is never deleted.

    It waits for the rows in flight, however long aligned_timeout is, which may take a while under backpressure.
    Meanwhile the job continues. While the job is being restarted, the savepoint waits until it runs again; if the
    job fails during the savepoint, none is made: repeat the command.

    Parameters
    ----------
    directory
        Where to write it: a directory or a storage URL that is empty or does not exist. Default: below the
        job's checkpoint directory.
    """
    from midstream.cli.commands.job_commands import make_savepoint

    return make_savepoint(job, directory, json)


@app.command
def stop(
    job: OptionalJob = None,
    /,
    *,
    drain: Annotated[bool, Parameter(negative=())] = False,
    savepoint: str | None = None,
    json: Json = False,
) -> Answer:
    """Stop a job at a checkpoint from which it can resume. If the checkpoint fails, the job continues.

    Parameters
    ----------
    drain
        End the sources instead and process everything in flight: windows fire, the job finishes.
    savepoint
        Stop with a savepoint in this directory or at this storage URL, which is empty or does not exist. It
        waits for the rows in flight, which may take a while under backpressure.
    """
    from midstream.cli.commands.job_commands import stop_job

    return stop_job(job, drain, savepoint, json)


@app.command
def rescale(
    job: OptionalJob = None,
    /,
    *,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    json: Json = False,
) -> Answer:
    """Change a job's parallelism: take a checkpoint and resume from exactly there, rows in flight included.

    If that is not possible, the job continues unchanged.

    Parameters
    ----------
    parallelism
        The new parallelism of operators whose parallelism the job does not set.
    """
    if parallelism is None:
        raise ConfigError("give the new parallelism, for example: midstream rescale --parallelism 4")
    from midstream.cli.commands.job_commands import rescale_job

    return rescale_job(job, parallelism, json)


@app.command
def inspect(
    checkpoint: str,
    /,
    *,
    from_: Annotated[str | None, Parameter(name="--from")] = None,
    allow_dropped_state: bool = False,
    checkpoint_dir: str | None = None,
    py_files: str | None = None,
    json: Json = False,
) -> Answer:
    """Show the contents of a checkpoint or savepoint, and verify every checksum.

    With the Python file of a job, show what becomes of each of its states when the job resumes; nothing is started.

    Parameters
    ----------
    checkpoint
        A checkpoint (chk-N), a savepoint, or a job's checkpoint directory, which means its latest checkpoint; the name
        or id of a job that runs on this machine; or the Python file of a job.
    from_
        Where the job would resume, as for `midstream run`. Default: latest.
    allow_dropped_state
        The job may drop state, as for `midstream run`.
    checkpoint_dir
        The checkpoint directory of the job, as for `midstream run`.
    py_files
        Files that the job imports, as for `midstream run`.
    """
    if checkpoint.endswith(".py"):
        from midstream.cli.commands.inspect_upgrade import inspect_upgrade

        modules = module_paths(py_files)
        return inspect_upgrade(Path(checkpoint), from_ or "latest", allow_dropped_state, checkpoint_dir, modules)
    if from_ is not None or checkpoint_dir is not None or py_files is not None or allow_dropped_state:
        raise ConfigError(
            f"{checkpoint!r} is not the Python file of a job, so there is nothing to compare: leave options out"
        )
    from midstream.cli.commands.inspect_checkpoint import inspect_checkpoint
    from midstream.cli.commands.job_commands import checkpoints_of

    return inspect_checkpoint(checkpoints_of(checkpoint))


@app.command
def state(
    checkpoint: str,
    uid: str | None = None,
    name: str | None = None,
    /,
    *,
    where: str | None = None,
    rows: Annotated[int, Parameter(converter=whole_number)] = 20,
    json: Json = False,
) -> Answer:
    """Show the entries of a job's state, from a checkpoint; without a uid, list the states.

    It reads files alone, so the job may be running, stopped or gone.

    Parameters
    ----------
    checkpoint
        A checkpoint (chk-N), a savepoint, or a job's checkpoint directory, which means its latest checkpoint; or the
        name or id of a job that runs on this machine.
    uid
        The uid of the operator.
    name
        The name of the state, if the operator has several.
    where
        A condition in SQL that the entries meet, such as "user = 17".
    rows
        The largest number of entries to show.
    """
    from midstream.cli.commands.job_commands import checkpoints_of
    from midstream.cli.commands.state import show_state

    return show_state(checkpoints_of(checkpoint), uid, name, where, rows)


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
    """Find problems before a job is started, and show what to change. No job is run.

    Starts a process on each core that the job needs, as the job would, and checks the versions, clocks and
    connections of all, and whether each can use the checkpoint directory.

    Parameters
    ----------
    job
        The Python file of a job. Without one, only the surroundings are checked.
    parallelism
        Subtasks per operator; without a job, the number of slots to check.
    master
        Spark master URL, as for `midstream run`.
    from_
        Where the job would resume, as for `midstream run`.
    fresh
        The job would start over, as for `midstream run`.
    checkpoint_dir
        Where checkpoints would go: a directory or a storage URL.
    py_files
        Files that the job imports, as for `midstream run`.
    slots
        "process": check this machine only, without Spark or Java.
    """
    from midstream.api.submit import StartOptions
    from midstream.cli.commands.doctor import run_doctor
    from midstream.cli.commands.run import Overrides, check_slots

    check_slots(slots)
    start = StartOptions(
        parallelism=parallelism, master=master, restore_from=from_, fresh=fresh, checkpoint_dir=checkpoint_dir
    )
    return run_doctor(job, Overrides(start, py_files, slots), json)


@app.command
def simulate(  # noqa: PLR0913 - one flag each
    job: Path,
    /,
    *,
    seeds: str | None = None,
    seed: Annotated[int | None, Parameter(converter=whole_number)] = None,
    parallelism: Annotated[int | None, Parameter(converter=whole_number)] = None,
    rescale_to: Annotated[int | None, Parameter(converter=whole_number)] = None,
    rows: Annotated[list[str] | None, Parameter(negative=())] = None,
    rows_max: Annotated[int | None, Parameter(converter=whole_number)] = None,
    latest: Annotated[list[str] | None, Parameter(negative=())] = None,
    ignore: Annotated[list[str] | None, Parameter(negative=())] = None,
    py_files: str | None = None,
    jobs: Annotated[int | None, Parameter(converter=whole_number)] = None,
    seconds: float | None = None,
    trace: Annotated[bool, Parameter(negative=(), group=OF_A_TRACE)] = False,
    channel: Annotated[str | None, Parameter(group=OF_A_TRACE)] = None,
    checkpoint: Annotated[int | None, Parameter(converter=whole_number, group=OF_A_TRACE)] = None,
    pattern: Annotated[str | None, Parameter(group=OF_A_TRACE)] = None,
    tail: Annotated[int | None, Parameter(converter=whole_number, group=OF_A_TRACE)] = None,
    json: Json = False,
) -> Answer:
    """Run a job through simulated failures, restarts and rescales, and check that its output stays the same.

    Its sources are replaced by recorded rows and its sinks by ones that record theirs; everything else is the engine
    itself, in one thread with a simulated clock. If the output differs, the command shows the shortest schedule that
    causes this, and the reason.

    Parameters
    ----------
    job
        A Python file that makes one Environment.
    seeds
        A:B, without B; each seed is one run. Default: 0:200.
    seed
        Run only this seed.
    parallelism
        Subtasks per operator; by default the seed decides.
    rescale_to
        The parallelism after a restart; by default the seed decides.
    rows
        UID=FILE, a Parquet, CSV or JSON lines file with the rows of the source with that uid; may be given several
        times.
    rows_max
        The number of rows to read from each source without given rows (200).
    latest
        SINK=KEY[,KEY], for a sink that gets a stream of updates: only the last row of each key counts.
    ignore
        SINK=COLUMN[,COLUMN], columns that may differ.
    py_files
        Python files, package directories and zips that the job imports, separated by commas.
    jobs
        The number of processes; by default one per core.
    seconds
        Begin no further run after this time.
    trace
        Show every event of the run of --seed.
    channel
        Show only events of channel edge:producer:consumer, such as 3:0:1 or 3:: (all of edge 3).
    checkpoint
        Show only events of the checkpoint with this number.
    pattern
        Show only lines that match this regular expression.
    tail
        Show only this many of the last lines.
    """
    from midstream.cli.commands.simulate import JobOptions, simulate_job
    from midstream.simulation.trace import Filters

    if seed is not None or trace:
        refuse({"--seeds": seeds}, "give either this or --seed, and --trace with --seed")
    if not trace:
        filtered = {"--channel": channel, "--checkpoint": checkpoint, "--pattern": pattern, "--tail": tail}
        refuse(filtered, "filters the lines of a trace: add --trace")
    options = JobOptions(
        path=job,
        rows=tuple(rows or ()),
        rows_max=rows_max,
        parallelism=parallelism,
        rescale_to=rescale_to,
        latest=tuple(latest or ()),
        ignore=tuple(ignore or ()),
        py_files=py_files,
        jobs=jobs,
        seconds=seconds,
    )
    filters = Filters(channel, checkpoint, pattern, tail) if trace else None
    return simulate_job(options, seeds, seed, filters, silent=json)


def main(argv: Sequence[str] | None = None, commands: App = app) -> int:
    """Run the command line, and return the exit status. `commands`: those of another program, which answers alike."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    json = "--json" in arguments
    errors = Console(stderr=True, highlight=False)
    log_to_stderr()
    try:
        if not json:
            return _answer(commands, arguments, json, sys.stdout, errors)
        with stdout_kept_for_the_answer() as stdout:
            return _answer(commands, arguments, json, stdout, errors)
    except BrokenPipeError:  # `midstream list | head`: the reader has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return Exit.OK
    except KeyboardInterrupt as interruption:
        print_error(errors, "interrupted")
        return 128 + getattr(interruption, "number", signal.SIGINT)
    except Exception:  # noqa: BLE001 - shown as Python shows it; its exit status 1 would mean that the job has failed
        traceback.print_exc()
        return Exit.BROKEN


def _answer(commands: App, arguments: list[str], json: bool, stdout: TextIO, errors: Console) -> int:
    try:
        answer = commands(arguments, exit_on_error=False, print_error=False)
        if isinstance(answer, Supervised):
            return supervise_driver(arguments, stdout if json else None)
        if isinstance(answer, Stream):
            print_stream(answer, json, stdout)
    except cyclopts.CycloptsError as error:
        problem = _usage_problem(commands, error, arguments)
        print_error(errors, problem, f"{_command_of(commands, arguments)} --help")
        return _refused(problem, json, stdout)
    except MidstreamError as error:
        exit_status = print_midstream_error(errors, error)
        _refused(str(error), json, stdout)
        return exit_status
    if isinstance(answer, Answer):  # else it has been printed, or was --help or --version
        print_answer(answer, json, stdout)
        return answer.exit
    return Exit.OK


def _refused(problem: str, json: bool, stdout: TextIO) -> int:
    if json:
        print_answer(Answer({"error": problem}, ""), json, stdout)
    return Exit.BAD_INPUT


def _command_of(commands: App, arguments: list[str]) -> str:
    known = bool(arguments) and arguments[0] in commands
    return f"{commands.name[0]} {arguments[0]}" if known else commands.name[0]


def _usage_problem(commands: App, error: cyclopts.CycloptsError, arguments: list[str]) -> str:
    """Return cyclopts's message, reworded where the original would confuse."""
    if isinstance(error, cyclopts.UnusedCliTokensError):
        extra = " ".join(error.unused_tokens or [])
        return f"{_command_of(commands, arguments)} takes no further argument: {extra}"
    if isinstance(error, cyclopts.UnknownCommandError) and arguments[0].startswith("-"):
        close = get_close_matches(arguments[0], ["--help", "--version"], n=1)
        return f"Unknown option: {arguments[0]}." + (f" Did you mean {close[0]}?" if close else "")
    return str(error)
