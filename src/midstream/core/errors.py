"""One small tree of errors. A message says what is wrong, where, and what to do."""

from __future__ import annotations

from typing import NoReturn


class MidstreamError(Exception):
    """Base of everything midstream raises on purpose."""


class JobError(MidstreamError):
    """The job as the user wrote it cannot be run, or its own function failed.

    `row`: of an error that is about one row, its position in the batch that the operator was given.
    """

    row: int | None = None


class ConfigError(MidstreamError):
    """A setting or option is missing, malformed, or contradicts another."""


class SchemaError(MidstreamError):
    """A column is missing or has another type than was declared."""


class StorageError(MidstreamError):
    """A file or directory cannot be read, written, or believed."""


class ClusterError(MidstreamError):
    """Spark, a slot, or the network did not give what the job needs."""


class UnavailableError(ClusterError):
    """What the job runs on has ended, or is not there now: the same program, started again later, may run."""


class InvariantError(MidstreamError):
    """midstream broke one of its own rules. Always a bug in midstream: please report it."""


def assert_never(value: NoReturn) -> NoReturn:
    """Stands where no value can arrive: mypy refuses the call while a case is left over. `typing` has one from 3.11 on.

    Raises InvariantError, in a running program, for the value that arrived nevertheless.
    """
    raise InvariantError(f"no case handles {value!r}, a {type(value).__name__}")
