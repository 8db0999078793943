"""Data files of an Iceberg table whose rows are to be sorted."""

from __future__ import annotations

from functools import cmp_to_key
from math import isnan
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from connector_worlds import written
from hypothesis import given, settings
from hypothesis import strategies as st
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.table.sorting import NullOrder, SortDirection, SortField, SortOrder
from pyiceberg.transforms import BucketTransform, IdentityTransform, TruncateTransform, VoidTransform

from committers import committer_of
from effort import examples
from midstream.connectors.common import compaction
from midstream.connectors.files import rolling_files
from midstream.connectors.iceberg import iceberg_sink
from midstream.connectors.iceberg.iceberg_sink import IcebergSink
from midstream.connectors.iceberg.iceberg_tables import new_schema
from midstream.engine.core.arrow_types import schema_of

SCHEMA = schema_of([("n", pa.int64()), ("name", pa.large_string()), ("x", pa.float64())])
VALUES = {
    "n": st.none() | st.integers(-3, 3),
    "name": st.none() | st.text("aZ\u00e9\uffff\U00010000", max_size=3),
    "x": st.none() | st.sampled_from([float("-inf"), -1.0, 0.5, float("inf"), float("nan")]),
}
ROWS = st.lists(st.tuples(*VALUES.values()), min_size=1, max_size=12)
TRANSFORMS = st.sampled_from([IdentityTransform(), TruncateTransform(2)])


def order_of(draw: st.DrawFn) -> list[SortField]:
    ids = draw(st.lists(st.sampled_from([1, 2, 3]), unique=True, min_size=1, max_size=3))
    return [
        SortField(
            source_id=each,
            transform=IdentityTransform() if each == 3 else draw(TRANSFORMS),
            direction=draw(st.sampled_from(SortDirection)),
            null_order=draw(st.sampled_from(NullOrder)),
        )
        for each in ids
    ]


ORDERS = st.composite(order_of)()


def in_order(fields: list[SortField], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort rows as the specification says, with Python's own comparisons."""

    def key(value: Any) -> Any:
        if isinstance(value, float):
            return (isnan(value), 0.0 if isnan(value) else value)
        return value.encode() if isinstance(value, str) else value

    def compared(one: dict[str, Any], other: dict[str, Any]) -> int:
        for field in fields:
            name = SCHEMA.names[field.source_id - 1]
            cut = isinstance(field.transform, TruncateTransform)
            pair = [row[name] for row in (one, other)]
            if cut:
                pair = [
                    value if value is None else value[:2] if isinstance(value, str) else value - value % 2
                    for value in pair
                ]
            left, right = pair
            if (left is None) != (right is None):
                return -1 if (left is None) == (field.null_order == NullOrder.NULLS_FIRST) else 1
            if left is not None and key(left) != key(right):
                return -1 if (key(left) < key(right)) == (field.direction == SortDirection.ASC) else 1
        return 0

    return sorted(rows, key=cmp_to_key(compared))


def catalog_at(path: Path) -> Catalog:
    catalog = load_catalog("lab", type="sql", uri=f"sqlite:///{path}/catalog.db", warehouse=f"file://{path}/warehouse")
    catalog.create_namespace("lake")
    return catalog


def sink_of(catalog: Catalog, **options: Any) -> IcebergSink:
    sink = IcebergSink("lake.t", catalog=catalog, **{"append": True, **options})
    sink.validate(SCHEMA, restoring=False)
    return sink


def rows_of(rows: list[Any]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], schema=SCHEMA)


def files_of(catalog: Catalog) -> list[tuple[list[dict[str, Any]], int | None, int]]:
    """Return for each file its rows, the sort order that the manifest records for it, and its number of row groups."""
    found = []
    for task in catalog.load_table("lake.t").scan().plan_files():
        file = pq.ParquetFile(task.file.file_path.removeprefix("file://"))
        found.append((file.read().to_pylist(), task.file.sort_order_id, file.metadata.num_row_groups))
    return found


@settings(max_examples=examples(40), deadline=None)
@given(fields=ORDERS, parts=st.lists(ROWS, min_size=1, max_size=4), held=st.sampled_from([4, 1000]))
def test_rows_of_a_row_group_are_sorted_and_a_file_with_one_says_so(fields, parts, held):
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rolling_files, "HELD_ROWS", held)
        patch.setattr(iceberg_sink, "_PAUSE_S", 0.0)
        patch.setattr(compaction, "FILES_MIN", 2)
        catalog = catalog_at(Path(directory))
        catalog.create_table("lake.t", new_schema(SCHEMA), sort_order=SortOrder(*fields))
        given_rows = []
        for number, part in enumerate(parts, 1):
            sink = sink_of(catalog)
            rows = rows_of(part)
            committer_of(sink, "job-a").commit(number, written(sink, rows, number, attempt=number))
            given_rows += rows.to_pylist()
        for compacts in (False, True):
            if compacts:
                compactor = committer_of(sink_of(catalog, auto_compact=True), "job-a")._compactor
                while compactor.compact_once() is not None:
                    pass
                assert len(files_of(catalog)) == 1 or len(parts) == 1
            seen = []
            for rows_in_file, order_id, groups in files_of(catalog):
                assert order_id == (1 if groups == 1 else None)
                if groups == 1:
                    assert repr(rows_in_file) == repr(in_order(fields, rows_in_file))
                seen += rows_in_file
            assert sorted(map(repr, seen)) == sorted(map(repr, given_rows))


def test_rows_that_replace_others_are_sorted_too(tmp_path):
    catalog = catalog_at(tmp_path)
    field = SortField(source_id=1, direction=SortDirection.DESC, null_order=NullOrder.NULLS_LAST)
    catalog.create_table("lake.t", new_schema(SCHEMA), sort_order=SortOrder(field))
    for number, names in enumerate((["a", "b", "c"], ["b", "d"]), 1):
        sink = sink_of(catalog, key=["name"])
        rows = rows_of([(number * 10 + at, name, None) for at, name in enumerate(names)])
        committer_of(sink, "job-a").commit(number, written(sink, rows, number, attempt=number))
    ((rows_in_file, order_id, _),) = files_of(catalog)
    assert [(row["n"], row["name"]) for row in rows_in_file] == [(21, "d"), (20, "b"), (12, "c"), (10, "a")]
    assert order_id == 1


@pytest.mark.parametrize("kind", ["within", "void", "bucket"])
def test_an_order_that_cannot_be_followed_leaves_rows_as_they_are(tmp_path, kind):
    catalog = catalog_at(tmp_path)
    columns = SCHEMA.append(pa.field("s", pa.struct([("a", pa.int64())])))
    catalog.create_table("lake.t", columns)
    table = catalog.load_table("lake.t")
    with table.update_sort_order() as order:
        if kind == "within":
            order.asc("s.a", IdentityTransform())
        else:
            order.asc("n", VoidTransform() if kind == "void" else BucketTransform(2))
    sink = sink_of(catalog)
    rows = rows_of([(n, None, None) for n in (5, 3, 4, 1)])
    committer_of(sink, "job-a").commit(1, written(sink, rows, 1))
    ((rows_in_file, order_id, _),) = files_of(catalog)
    numbers = [row["n"] for row in rows_in_file]
    if kind == "bucket":
        of_bucket = BucketTransform(2).transform(table.schema().find_type("n"))
        assert numbers == sorted((5, 3, 4, 1), key=lambda n: of_bucket(n) or 0)
        assert order_id == 1
    else:
        assert numbers == [5, 3, 4, 1]
        assert order_id is None
