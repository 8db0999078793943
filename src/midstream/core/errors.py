"""The tree of errors. A message says what is wrong, where, and what to do."""

from __future__ import annotations

from typing import NoReturn


class MidstreamError(Exception):
    """Base of all errors that midstream raises on purpose."""


class JobError(MidstreamError):
    """The job cannot run as it was written, or one of its own functions failed.

    `row`: for an error about one row, its position in the batch that the operator was given.
    """

    row: int | None = None


class ConfigError(MidstreamError):
    """A setting or option is missing, malformed, or contradicts another."""


class SchemaError(MidstreamError):
    """A column is missing, or its type differs from the declared one."""


class StorageError(MidstreamError):
    """A file or directory cannot be read, cannot be written, or is corrupt."""


class ClusterError(MidstreamError):
    """Spark, a slot, or the network failed to provide what the job needs."""


class UnavailableError(ClusterError):
    """The environment in which the job runs has ended or is not available; the same program may run when it is started
    again later.
    """


class InvariantError(MidstreamError):
    """midstream violated one of its own invariants. This is always a bug in midstream: please report it."""


def assert_never(value: NoReturn) -> NoReturn:
    """Mark a place that no value can reach: mypy refuses the call while a case is missing.

    `typing.assert_never` exists from Python 3.11 on. Raises InvariantError if a value arrives in a running program.
    """
    raise InvariantError(f"no case handles {value!r}, a {type(value).__name__}")
