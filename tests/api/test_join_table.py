"""`join_table` in whole jobs: what is joined with which version, and what a failure or a restore changes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import examples
from midstream import (
    ConfigError,
    Count,
    DataStream,
    Environment,
    JobError,
    MidstreamError,
    WatermarkStrategy,
    testing,
    tumbling,
)
from midstream.engine.operators import table_join

USERS = pl.DataFrame({"user": ["ann", "bob"], "country": ["FR", "DE"]})


def orders(rows: list[dict[str, Any]] | None = None) -> DataStream:
    given = [{"user": user, "n": n} for n, user in enumerate(["ann", "bob", None, "eve", "ann"])]
    schema = {"user": str, "n": int}
    return Environment("shop").from_collection(given if rows is None else rows, schema=schema).uid("orders")


def refreshed(path: Path, users: pl.DataFrame = USERS, **options: Any) -> DataStream:
    users.write_parquet(path)
    return orders([]).join_table(path, on="user", refresh="10 s", **options).uid("joined")


def replace_file(path: Path, users: pl.DataFrame) -> None:
    users.write_parquet(path.with_suffix(".tmp"))
    os.replace(path.with_suffix(".tmp"), path)


def country(job: Any) -> str:
    [row] = job.feed("orders", {"user": "ann", "n": 1}).take()
    return str(row["country"])


# ---- rows ------------------------------------------------------------------


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from([None, "a", "b", "c", "d"]), max_size=12),
    st.lists(st.sampled_from(["a", "b", "c", "x"]), unique=True),
    st.sampled_from(["inner", "left", "semi", "anti"]),
    st.sampled_from([1, 3, "whole"]),
)
def test_the_result_is_what_polars_joins_however_batches_are_cut(
    keys: list[str | None], table: list[str], how: Any, cut: Any
) -> None:
    left = pl.DataFrame({"user": keys, "n": range(len(keys))}, schema={"user": pl.String, "n": pl.Int64})
    right = pl.DataFrame(
        {"who": table, "n": [None, *range(len(table) - 1)][: len(table)]}, schema={"who": pl.String, "n": pl.Float64}
    )
    joined = orders(left.to_dicts()).join_table(right, left_on="user", right_on="who", how=how)
    expected = left.join(right, left_on="user", right_on="who", how=how, maintain_order="left")
    assert joined.schema.names == expected.columns
    assert testing.run(joined, cut=cut).rows == expected.to_dicts()


def test_event_time_passes_through_untouched() -> None:
    at = pl.datetime(2024, 1, 1, time_unit="us") + pl.duration(minutes=pl.col("n"))
    timed = orders().with_columns(at=at).with_watermarks("at", WatermarkStrategy.monotonous())
    table = USERS.with_columns(at=pl.lit("another"))
    joined = timed.join_table(table, on="user", how="left")
    assert joined.event_time == "at"
    assert joined.schema.names == ["user", "n", "at", "country", "at_right"]
    counted = joined.window_all(tumbling("2 min")).aggregate(n=Count())
    assert [row["n"] for row in testing.run(counted).rows] == [2, 2, 1]


# ---- versions --------------------------------------------------------------


def test_a_refresh_replaces_the_table_for_the_rows_after_it(tmp_path: Path) -> None:
    path = tmp_path / "users.parquet"
    with testing.job(refreshed(path)) as job:
        assert country(job) == "FR"
        replace_file(path, USERS.with_columns(country=pl.lit("NL")))
        assert country(job) == "FR"
        job.advance_processing_time("11 s")
        assert country(job) == "NL"
        assert job.metrics("joined")["table_rows"] == 2


def test_a_refresh_that_fails_keeps_the_version_before_and_is_counted_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "users.parquet"
    failures = [
        pl.concat([USERS, USERS]),
        USERS.drop("country"),
        USERS.with_columns(country=pl.lit(1.5)),
        USERS.with_columns(user=pl.lit(3)),
    ]
    with testing.job(refreshed(path)) as job, caplog.at_level(logging.WARNING, table_join.__name__):
        assert country(job) == "FR"
        for number, users in enumerate(failures, 1):
            replace_file(path, users)
            job.advance_processing_time("10 s")
            assert country(job) == "FR"
            assert job.metrics("joined")["table_refreshes_failed"] == number
        path.unlink()
        job.advance_processing_time("10 s")
        assert country(job) == "FR"
        assert job.metrics("joined")["table_refreshes_failed"] == len(failures) + 1
        replace_file(path, USERS.with_columns(country=pl.lit("NL")))
        job.advance_processing_time("10 s")
        assert country(job) == "NL"
    texts = [record.getMessage() for record in caplog.records if "tried again in 10 s" in record.getMessage()]
    for text, why in zip(
        texts, ("key user='ann' is in 2 rows", "'country'", "'country'", "'user'", "no file"), strict=True
    ):
        assert text.startswith(f"operator 'join_table': the table ({path})")
        assert why in text


def test_a_first_load_that_fails_fails_the_task(tmp_path: Path) -> None:
    path = tmp_path / "users.parquet"
    joined = refreshed(path)
    replace_file(path, pl.concat([USERS, USERS]))
    with pytest.raises(
        MidstreamError, match=r"key user='ann' is in 2 rows.*No row is joined before the table is there"
    ):
        testing.run(joined, {"orders": [{"user": "ann", "n": 1}]})


def test_a_restore_continues_with_the_version_of_the_checkpoint_until_the_next_is_due(tmp_path: Path) -> None:
    path = tmp_path / "users.parquet"
    joined = refreshed(path)
    with testing.job(joined) as job:
        assert country(job) == "FR"
        job.advance_processing_time("6 s")
        snapshot = job.snapshot()
    replace_file(path, USERS.with_columns(country=pl.lit("NL")))
    for parallelism in (1, 3, 1):
        with testing.job(joined, restore=snapshot, parallelism=parallelism) as job:
            assert {country(job) for _ in range(2 * parallelism)} == {"FR"}
            job.advance_processing_time("3 s")
            assert country(job) == "FR"
            job.advance_processing_time("2 s")
            assert {country(job) for _ in range(parallelism)} == {"NL"}


def test_an_empty_version_is_restored_too(tmp_path: Path) -> None:
    path = tmp_path / "users.parquet"
    joined = refreshed(path, USERS.clear(), how="left")
    with testing.job(joined) as job:
        assert country(job) == "None"
        snapshot = job.snapshot()
    replace_file(path, USERS)
    for parallelism in (1, 2):
        with testing.job(joined, restore=snapshot, parallelism=parallelism) as job:
            assert country(job) == "None"


def test_subtasks_that_loaded_different_versions_all_continue_with_the_newest(tmp_path: Path) -> None:
    path = tmp_path / "users.parquet"
    joined = refreshed(path)
    with testing.job(joined, parallelism=2) as job:
        for operator, name in zip(job.operators("joined"), ("FR", "NL"), strict=True):
            replace_file(path, USERS.with_columns(country=pl.lit(name)))
            job.advance_processing_time("11 s") if name == "NL" else country(job)
            operator._load_in(None)  # type: ignore[attr-defined]  # the first subtask does not refresh
        versions = {country(job) for _ in range(2)}
        snapshot = job.snapshot()
    assert versions == {"FR", "NL"}
    with testing.job(joined, restore=snapshot, parallelism=2) as job:
        job.operators("joined")
        assert {country(job) for _ in range(2)} <= {"FR", "NL"}
    with testing.job(joined, restore=snapshot, parallelism=3) as job:
        assert {country(job) for _ in range(3)} == {"NL"}


def test_a_version_is_one_chunk_in_all_checkpoints(tmp_path: Path) -> None:
    path = tmp_path / "users.parquet"
    with testing.job(refreshed(path)) as job:
        ids = []
        for _ in range(2):
            country(job)
            for _ in range(2):
                [operator] = [one for one in job.snapshot().metadata.operators if one.uid == "joined"]
                [part] = operator.subtasks[0].parts
                ids.append([chunk.id for chunk in part.chunks])
            job.advance_processing_time("11 s")
    assert ids[0] == ids[1] != ids[2] == ids[3]
    assert len(ids[0]) == 1


def test_another_table_does_not_continue_with_the_state_of_the_one_before(tmp_path: Path) -> None:
    with testing.job(refreshed(tmp_path / "users.parquet")) as job:
        country(job)
        snapshot = job.snapshot()
    with pytest.raises(ConfigError, match=r"the table was .*users\.parquet, now it is .*others\.parquet"):
        testing.run(refreshed(tmp_path / "others.parquet"), restore=snapshot)


# ---- what it is loaded from ------------------------------------------------


@pytest.mark.parametrize("suffix", ["parquet", "csv", "jsonl"])
def test_files_are_read_as_read_files_reads_them(tmp_path: Path, suffix: str) -> None:
    for number, part in enumerate(USERS.iter_slices(1)):
        path = tmp_path / f"{number}.{suffix}"
        write: Any = {"parquet": part.write_parquet, "csv": part.write_csv, "jsonl": part.write_ndjson}[suffix]
        write(path)
    expected = orders().join_table(USERS, on="user")
    tables: list[Any] = [tmp_path, f"{tmp_path}/*.{suffix}", [tmp_path / f"0.{suffix}", str(tmp_path / f"1.{suffix}")]]
    for table in tables:
        joined = orders().join_table(table, on="user")
        assert joined.schema == expected.schema
        assert testing.run(joined).rows == testing.run(expected).rows
    keys = orders().join_table(tmp_path, on="user", schema={"user": str})
    assert [row["n"] for row in testing.run(keys).rows] == [0, 1, 4]


def test_the_columns_of_files_are_those_that_the_job_was_built_with(tmp_path: Path) -> None:
    """Not what the next version looks like: texts may all be digits, numbers whole, and columns empty."""
    path = tmp_path / "users.csv"
    path.write_text("user,code,share\nann,a1,0.5\n")
    joined = orders([]).join_table(path, on="user", refresh="10 s").uid("joined")
    with testing.job(joined) as job:
        for code, share, found in (("007", "5", 5.0), ("2024-01-01", "", None), ("true", "1", 1.0)):
            path.write_text(f"user,code,share\nann,{code},{share}\n")
            job.advance_processing_time("10 s")
            [row] = job.feed("orders", {"user": "ann", "n": 1}).take()
            assert (row["code"], row["share"]) == (code, found)
        path.write_text("user,code,share\n")
        job.advance_processing_time("10 s")
        assert job.feed("orders", {"user": "ann", "n": 1}).take() == []


@pytest.mark.parametrize(
    ("suffix", "rows", "none"),
    [("csv", "user,country\nann,FR\n", "user,country\n"), ("jsonl", '{"user":"ann","country":"FR"}\n', None)],
)
def test_a_text_file_that_was_truncated_is_no_table_without_rows(
    suffix: str, rows: str, none: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / f"users.{suffix}"
    path.write_text(rows)
    joined = orders([]).join_table(path, on="user", how="left", refresh="10 s").uid("joined")
    with testing.job(joined) as job, caplog.at_level(logging.WARNING, table_join.__name__):
        assert country(job) == "FR"
        path.write_text("")
        job.advance_processing_time("10 s")
        assert country(job) == "FR"
        assert f"{path}: empty (0 bytes)" in caplog.text
        if none is not None:
            path.write_text(none)
            job.advance_processing_time("10 s")
            assert country(job) == "None"


@pytest.mark.parametrize("mapping", ["none", "name"])
def test_a_delta_table_is_read_at_its_newest_version(mapping: str, tmp_path: Path) -> None:
    deltalake = pytest.importorskip("deltalake", reason="deltalake is not installed")
    configuration = {"delta.columnMapping.mode": mapping} if mapping != "none" else {}
    deltalake.DeltaTable.create(tmp_path, USERS.to_arrow().schema, configuration=configuration)
    deltalake.write_deltalake(tmp_path, USERS.to_arrow(), mode="append")
    joined = orders([]).join_table(tmp_path, on="user", refresh="10 s")
    with testing.job(joined) as job:
        assert country(job) == "FR"
        deltalake.write_deltalake(tmp_path, USERS.with_columns(country=pl.lit("NL")).to_arrow(), mode="overwrite")
        job.advance_processing_time("11 s")
        assert country(job) == "NL"


def returning(frame: Any) -> Callable[[], Any]:
    return lambda: frame


def test_a_function_may_return_any_frame() -> None:
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frames = [USERS, USERS.lazy(), USERS.to_arrow(), pandas.DataFrame(USERS.to_dict(as_series=False))]
    for frame in frames:
        assert len(testing.run(orders().join_table(returning(frame), on="user")).rows) == 3
    called = orders().join_table(lambda: 1 / 0, on="user", schema={"user": str})
    with pytest.raises(ZeroDivisionError):
        testing.run(called)


# ---- refused at the call ---------------------------------------------------


def wrong_columns() -> pl.DataFrame:
    return USERS.rename({"country": "n_right"}).with_columns(n=pl.lit(1))


async def a_coroutine() -> pl.DataFrame:
    return USERS


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (USERS, {"on": "usr"}, "key column 'usr' is not in the stream (user, n)"),
        (USERS, {"left_on": "user", "right_on": "usr"}, "key column 'usr' is not in the table (user, country)"),
        (USERS, {}, "name the key columns with on="),
        (USERS, {"left_on": "user"}, "name the key columns with on="),
        (USERS, {"on": []}, "name at least one key column"),
        (USERS, {"on": ["user", "user"]}, "is named twice in user, user"),
        (USERS, {"left_on": "n", "right_on": "user"}, "the keys do not match: n (int64) of the stream and user"),
        (USERS.with_columns(user=pl.lit(0.5)), {"on": "user"}, "'user' of the table is double, which cannot be a key"),
        (USERS, {"on": "user", "how": "full"}, "how='full' is none of 'inner', 'left', 'semi', 'anti'"),
        (USERS, {"on": "user", "refresh": "1 s"}, "refresh= is given with a frame"),
        (wrong_columns, {"on": "user", "refresh": 0}, "0 is not an interval"),
        (USERS, {"on": "user", "suffix": ""}, "suffix='' must be a text"),
        (wrong_columns, {"on": "user"}, "two columns of the result would be called 'n_right'"),
        (pl.concat([USERS, USERS]), {"on": "user"}, "key user='ann' is in 2 rows"),
        (USERS, {"on": "user", "schema": {"user": str, "zz": int}}, "column 'zz' is missing; there are user, country"),
        ("none.parquet", {"on": "user"}, "there is no file"),
        (lambda user: USERS, {"on": "user"}, "is called without arguments, but takes (user)"),
        (a_coroutine, {"on": "user"}, "a_coroutine is a coroutine function"),
        (lambda: None, {"on": "user"}, "give a polars or pandas DataFrame"),
        (3, {"on": "user"}, "int is no table; give a polars, Arrow or pandas frame"),
    ],
)
def test_what_cannot_be_joined_is_refused_at_the_call(table: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(MidstreamError) as caught:
        orders().join_table(table, **options)
    assert message in str(caught.value)
    assert str(caught.value).startswith("test_join_table.py:")


def test_a_stream_is_no_table() -> None:
    with pytest.raises(JobError, match=r"DataStream is no table.*join\(\) joins two streams"):
        orders().join_table(orders(), on="user")  # type: ignore[arg-type]


def test_a_repeated_key_is_no_matter_where_only_its_presence_counts() -> None:
    joined = orders().join_table(pl.concat([USERS, USERS]), on="user", how="semi")
    assert [row["n"] for row in testing.run(joined).rows] == [0, 1, 4]


def test_a_table_of_arrow_types_keeps_every_value() -> None:
    made = pa.table({"user": pa.array(["ann"], pa.string()), "x": pa.array([[1, None]], pa.list_(pa.int8()))})
    [first, _] = testing.run(orders().join_table(made, on="user")).rows
    assert first["x"] == [1, None]
