"""Savepoints whose state comes from tables: repaired, filled from history, or without an operator."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import NoneType
from typing import Any, TypeAlias

import polars as pl
import pyarrow as pa

from midstream.api.environment import Environment
from midstream.engine.checkpoint.changed_savepoint import (
    LikeCheckpoint,
    SavepointChanges,
    beginning_of,
    checked,
    write_changed,
)
from midstream.engine.checkpoint.savepoint import SavepointFile, claim_location, discard
from midstream.engine.checkpoint.store import SAVEPOINT
from midstream.engine.core.batches import to_arrow
from midstream.engine.core.config import MAX_PARALLELISM_MAX
from midstream.engine.core.errors import ConfigError, SchemaError, StorageError
from midstream.engine.graph.graph_builder import build_job_graph
from midstream.runtime.random_ids import RandomIds
from midstream.runtime.storage.file_storage import FileStorage, absolute, check_can_create
from midstream.runtime.storage.stored_checkpoint import open_checkpoint

StateTable: TypeAlias = Any
"""A polars DataFrame or LazyFrame, an Arrow Table or RecordBatch, a pandas DataFrame, or a Spark DataFrame."""


def write_savepoint(
    path: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | Environment,
    states: Mapping[tuple[str, str], StateTable] | None = None,
    drop: Iterable[str] = (),
    max_parallelism: int | None = None,
) -> str:
    """Write a new savepoint: like another one, with the rows of some states replaced by those of tables.

    `path`: the directory of the new savepoint, which is empty or does not exist; a path or a storage URL.
    `like`: a savepoint, a checkpoint (chk-N) without rows in flight or output to commit, or a job's checkpoint
    directory, which means its newest checkpoint. Or the Environment of a job that has never run: its sources then start
    at their beginning.
    `states`: the new rows of states, all of them, by the uid of the operator and the name of the state. Their columns are
    those that `read_state` returns, with the same values in any type that holds them. A polars DataFrame or LazyFrame, an
    Arrow Table or RecordBatch, a pandas DataFrame, or a Spark DataFrame, which is collected to the driver,
    up to spark.driver.maxResultSize; all are held in memory.
    `drop`: the uids of operators and sources that begin without state.
    `max_parallelism`: another number of key groups, for all state; by default that of `like`.

    States of process functions, timers, and tables of functions on batches can be written. Values of a state without a
    type are kept as they are, as bytes. `like` is only read.

    Return the path, for `restore_from=`. The savepoint was read back and verified; if anything fails, there is none.

    Raises SchemaError for rows that the state cannot have, with column and row, ConfigError if there is no such state or
    it cannot be changed, StorageError if the directory is not empty or something cannot be read or written.

        >>> shop = Environment("shop")
        >>> sold = shop.from_collection([{"user": "ann", "price": 3}]).key_by("user")
        >>> _ = sold.process(Total(), {"user": str, "total": int}).uid("totals").print()
        >>> history = pl.DataFrame({"user": ["ann", "bob"], "total": [70, 90]})
        >>> begin = write_savepoint("begin", like=shop, states={("totals", "total"): history})
        >>> read_state(begin, "totals", "total").collect().rows()
        [('ann', 70), ('bob', 90)]
        >>> right = pl.when(user="ann").then(75).otherwise("total").alias("total")
        >>> rows = read_state(begin, "totals", "total").with_columns(right)
        >>> repaired = write_savepoint("repaired", like=begin, states={("totals", "total"): rows})
        >>> sorted(read_state(repaired, "totals", "total").collect().rows())
        [('ann', 75), ('bob', 90)]
    """
    where = absolute(_text(path, "the path"))
    if isinstance(drop, str):
        raise ConfigError(f"write_savepoint: drop={drop!r} is a list of uids; write drop=[{drop!r}]")
    if not isinstance(states, (Mapping, NoneType)):
        raise ConfigError("write_savepoint: states is a dict; write {(uid, name): table}")
    changes = SavepointChanges(
        {_checked_name(name): _table(table, name) for name, table in (states or {}).items()},
        frozenset(drop),
        _checked_groups(max_parallelism),
    )
    check_can_create(where)
    ids = RandomIds()
    if isinstance(like, Environment):
        if max_parallelism is not None:
            raise ConfigError("write_savepoint: give max_parallelism to the Environment, which is the job's own")
        graph, config = build_job_graph(like.program.graph, like.program.config), like.program.config
        metadata = beginning_of(graph, config.name, ids.new_id(), time.time_ns() // 10**6)
        base, root = LikeCheckpoint(FileStorage(where), metadata, f"job {config.name!r}"), config.checkpoint_dir
    else:
        opened = open_checkpoint(_text(like, "like"))
        base = LikeCheckpoint(opened.storage, opened.metadata, opened.path)
        root = None if opened.storage.exists(SAVEPOINT) else absolute(opened.root)
    replaced = checked(base, changes, ids)
    location = claim_location(FileStorage, where, root, SavepointFile(base.metadata.job_name, base.metadata.job_id))
    try:
        write_changed(base, changes, replaced, location, ids)
    except BaseException:
        with suppress(StorageError):  # what is left there is no savepoint
            discard(location)
        raise
    open_checkpoint(where)
    return where


def _text(path: object, what: str) -> str:
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"write_savepoint: {what} is a path such as 'saved/orders', not {path!r:.200}")
    return os.fspath(path)


def _checked_groups(max_parallelism: object) -> int | None:
    if max_parallelism is None or (type(max_parallelism) is int and 1 <= max_parallelism <= MAX_PARALLELISM_MAX):
        return max_parallelism
    raise ConfigError(f"write_savepoint: max_parallelism={max_parallelism!r} is not from 1 to {MAX_PARALLELISM_MAX}")


def _checked_name(name: object) -> tuple[str, str]:
    if isinstance(name, tuple) and len(name) == 2 and all(isinstance(each, str) for each in name):
        return name
    raise ConfigError(
        f"write_savepoint: states: {name!r} does not name a state; write {{(uid, name): table}}, with the uid of the operator "
        "and the name of the state, as midstream state lists them"
    )


def _table(given: object, name: object) -> pa.Table:
    where = f"states[{name!r}]"
    if isinstance(given, pl.LazyFrame):
        given = given.collect()
    try:
        if isinstance(given, pl.DataFrame):
            return to_arrow(given)
        if isinstance(given, pa.RecordBatch):
            return pa.Table.from_batches([given])
        if isinstance(given, pa.Table):
            return given
        if type(given).__module__.partition(".")[0] == "pandas":
            return pa.Table.from_pandas(given, preserve_index=False)
        if hasattr(given, "toArrow"):  # of Spark
            made = given.toArrow()
            assert isinstance(made, pa.Table), made
            return made
    except (SchemaError, pa.ArrowException) as error:
        raise SchemaError(f"{where}: {error}") from error
    raise ConfigError(
        f"{where}: {type(given).__name__} is not a table; give a DataFrame of polars, pandas or Spark, or an Arrow Table"
    )
