"""The tree of errors. A message states what is wrong, where, and what to do."""

from __future__ import annotations

from typing import Final, NoReturn

import msgspec

UNDECODABLE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not an encoded value of the expected type: texts in them need not be UTF-8."""


class MidstreamError(Exception):
    """Base of all errors that midstream raises on purpose.

    For example:

        >>> try:
        ...     Environment("shop", parallelism=0)
        ... except MidstreamError as error:
        ...     print(type(error).__name__)
        ConfigError
    """


class JobError(MidstreamError):
    """The job cannot run as it was written, or one of its own functions failed.

    `row`: for an error about one row, its position in the batch that the operator was given.

        >>> orders.filter("price > 3")
        Traceback (most recent call last):
            ...
        midstream.engine.core.errors.JobError: ...filter: 'price > 3' is not a column (user, price); a condition is a polars expression, such as pl.col('x') > 0, also from SQL: pl.sql_expr('price > 3')
    """

    row: int | None = None


class ConfigError(MidstreamError):
    """A setting or option is missing, malformed, or contradicts another.

    For example:

        >>> Environment("shop", parallelism=0)
        Traceback (most recent call last):
            ...
        midstream.engine.core.errors.ConfigError: ...the job: parallelism 0 is not a positive whole number
    """


class SchemaError(MidstreamError):
    """A column is missing, or its type differs from the declared one.

    For example:

        >>> orders.select("prize")
        Traceback (most recent call last):
            ...
        midstream.engine.core.errors.SchemaError: ...operator 'select': column 'prize' is not in the stream's schema (user, price)
    """


class StorageError(MidstreamError):
    """A file or directory cannot be read, cannot be written, or is corrupt.

    For example:

        try:
            env.execute()
        except StorageError:
            ...  # the same program may run once the disk has room, or the server answers
    """


class DataError(StorageError):
    """What was read is malformed or damaged, or was changed meanwhile: reading it again does not help, so the job ends.

    For example:

        >>> _ = Path("numbers.parquet").write_bytes(b"1, 2, 3")
        >>> env.read_files("numbers.parquet")
        Traceback (most recent call last):
            ...
        midstream.engine.core.errors.DataError: .../numbers.parquet: cannot be read as parquet; it is incomplete, damaged, ...
    """


class ClusterError(MidstreamError):
    """Spark, a slot, or the network failed to provide what the job needs.

    For example:

        try:
            env.execute()
        except ClusterError:
            ...  # the same program may run when it is started again
    """


class UnavailableError(ClusterError):
    """The environment in which the job runs has ended or is not available.

    The same program may run when it is started again later, for example:

        try:
            env.execute()
        except UnavailableError:
            ...  # Spark has no free core within `slot_timeout`: try again in some minutes
    """


class InvariantError(MidstreamError):
    """midstream violated one of its own invariants. This is always a bug in midstream: please report it."""


def is_permanent(error: BaseException) -> bool:
    """Whether the same operation would fail again in the same way, so that a restart cannot help."""
    return isinstance(error, (ConfigError, SchemaError, DataError))


def assert_never(value: NoReturn) -> NoReturn:
    """Mark a place that no value can reach: mypy refuses the call while a case is missing.

    Raises InvariantError, unlike `typing.assert_never`, if a value arrives in a running program.
    """
    raise InvariantError(f"no case handles {value!r}, a {type(value).__name__}")


def text_of(error: BaseException) -> str:
    """Return the message of an exception of user code, even one whose text cannot be made."""
    try:
        return str(error)
    except Exception as second:  # noqa: BLE001 - even `__str__` is user code
        return f"(no text: its __str__ raised {type(second).__name__})"
