"""What a slot tells the driver of an exception, whatever user code has put into it."""

from __future__ import annotations

import traceback

from midstream.core.errors import ConfigError, SchemaError
from midstream.core.ids import TaskId
from midstream.protocol import messages as m

SUMMARY_CHARS_MAX = 10_000
DETAILS_CHARS_MAX = 100_000


def task_failed(attempt: int, ref: TaskId, name: str, error: BaseException, symptom: bool) -> m.TaskFailed:
    summary, details = _texts(error)
    return m.TaskFailed(attempt, ref, f"{name} (subtask {ref.subtask}): {summary}", details, _is_fatal(error), symptom)


def deploy_failed(attempt: int, error: BaseException) -> m.DeployFailed:
    return m.DeployFailed(attempt, *_texts(error), _is_fatal(error))


def _is_fatal(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    return isinstance(error, (SchemaError, ConfigError))


def _texts(error: BaseException) -> tuple[str, str]:
    """Type and message, and the traceback. User code may raise what has no text, or has megabytes of it."""
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - even `__str__` is user code
        text = f"(no text: its __str__ raised {type(second).__name__})"
    details = "".join(traceback.format_exception(error))
    return _shortened(f"{type(error).__name__}: {text}", SUMMARY_CHARS_MAX), _shortened(details, DETAILS_CHARS_MAX)


def _shortened(text: str, chars_max: int) -> str:
    if len(text) <= chars_max:
        return text
    half = chars_max // 2
    return f"{text[:half]} … ({len(text) - 2 * half} characters left out) … {text[-half:]}"
