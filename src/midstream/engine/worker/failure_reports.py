"""The messages by which a slot reports an exception to the driver, regardless of its content."""

from __future__ import annotations

import logging
import traceback

from midstream.engine.core.error_rows import sendable
from midstream.engine.core.errors import JobError, is_permanent, text_of
from midstream.engine.core.ids import TaskId
from midstream.engine.core.tracebacks import depends_on_values, kind_and_line
from midstream.engine.protocol import messages as m
from midstream.engine.worker.operator_chain import OperatorChain
from midstream.engine.worker.source_reader import SourceReader

_log = logging.getLogger(__name__)

SUMMARY_CHARS_MAX = 10_000
DETAILS_CHARS_MAX = 100_000


def task_failed(
    attempt: int, ref: TaskId, name: str, error: BaseException, symptom: bool, operator: str = "", position: str = ""
) -> m.TaskFailed:
    """The report of a task's failure.

    `operator` is the uid of the current operator, and `position` that of its rows in the input.
    """
    summary, details = _texts(error)
    summary = f"{_subtask(ref, name, operator)}: {summary}{f' ({sendable(position)})' if position else ''}"
    return m.TaskFailed(
        attempt,
        ref,
        summary,
        details,
        is_permanent(error),
        symptom,
        _fingerprint(operator, error),
        _of_one_row(error, position),
    )


def position_of_failure(source: SourceReader | None, chain: OperatorChain, error: BaseException, name: str) -> str:
    """The position in the input of the rows on which an operator of the task has failed, or "" if it is unknown."""
    if source is None or not source.emitting_rows or not chain.processes_batch:
        return ""
    row = error.row if isinstance(error, JobError) else None
    try:
        return source.position_of(chain.row_in_batch(source.emitting_rows, row))
    except Exception:  # noqa: BLE001 - whatever `Source.place` raises must not hide the failure itself
        _log.warning("%s: the position of its rows in the input is unknown", name, exc_info=True)
        return ""


def deploy_failed(attempt: int, error: BaseException, opening: tuple[TaskId, str, str] | None = None) -> m.DeployFailed:
    """The report of a deployment's failure.

    `opening` is the task that was being opened, with the name and uid of its operator.
    """
    summary, details = _texts(error)
    operator = ""
    if opening is not None:
        ref, name, operator = opening
        summary = f"{_subtask(ref, name, operator)} could not be opened: {summary}"
    return m.DeployFailed(attempt, summary, details, is_permanent(error), _fingerprint(operator, error))


def _subtask(ref: TaskId, name: str, operator: str) -> str:
    return f"{name} (subtask {ref.subtask}" + (f", uid {operator!r})" if operator else ")")


def commit_failed(request: int, error: BaseException, stopped: bool) -> m.CommitFailed:
    return m.CommitFailed(request, *_texts(error), is_permanent(error), _fingerprint("", error), stopped)


def _fingerprint(operator: str, error: BaseException) -> str:
    what = kind_and_line(error)
    return what and f"{operator}: {what}"


def _of_one_row(error: BaseException, position: str) -> bool:
    """Whether the failure is that of a known row, and depends on the row alone as far as the exception shows."""
    is_known = isinstance(error, JobError) and (error.row is not None or bool(position))
    return is_known and depends_on_values(error)


def _texts(error: BaseException) -> tuple[str, str]:
    """The exception's type and message, and its traceback. User code may raise one that has megabytes."""
    details = "".join(traceback.format_exception(error))
    summary = f"{type(error).__name__}: {text_of(error)}"
    return sendable(_shortened(summary, SUMMARY_CHARS_MAX)), sendable(_shortened(details, DETAILS_CHARS_MAX))


def _shortened(text: str, chars_max: int) -> str:
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"
