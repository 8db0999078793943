"""Delta tables with column mapping: the columns have other names, or only ids, in the files."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from connector_worlds import written
from deltalake import DeltaTable, QueryBuilder, write_deltalake
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from table_worlds import CONTEXT, Job, read

from committers import committer_of
from effort import examples
from midstream.connectors.common import compaction
from midstream.connectors.delta.column_mapping import as_in_files
from midstream.connectors.delta.delta_sink import DeltaSink
from midstream.connectors.delta.delta_source import DeltaSource
from midstream.engine.core.arrow_types import schema_of
from midstream.engine.core.errors import ConfigError, DataError, SchemaError
from midstream.engine.operators.sink_api import CommittedOutput
from midstream.engine.operators.source_api import DiscoveryContext, Split

MODES = ["name", "id"]
INNER = pa.struct([("x", pa.int64()), ("l", pa.large_list(pa.struct([("z", pa.large_string())])))])
COLUMNS = schema_of([("n", pa.int64()), ("part", pa.large_string()), ("at", pa.timestamp("us", "UTC")), ("s", INNER)])
OUTPUT = CommittedOutput("out", frozenset(["job-a"]))


def rows_of(schema: pa.Schema, *numbers: int) -> pa.RecordBatch:
    """Rows whose values follow from their number, and of which each column lacks others."""
    found: list[pa.Array[Any]] = []
    for index, kind in enumerate(schema.types):
        values: list[Any] = []
        for number in numbers:
            null = index > 0 and (number + index) % 5 == 0
            if pa.types.is_struct(kind):
                value: Any = {
                    field.name: [{field.type.value_type.field(0).name: f"z{number}"}] if "l" in field.name else number
                    for field in kind
                }
            elif pa.types.is_large_string(kind):
                value = f"p{number % 3}"
            else:
                value = number
            values.append(None if null else value)
        found.append(pa.array(values, kind))
    return pa.RecordBatch.from_arrays(found, schema=schema)


class Mapped:
    """A table with column mapping, and what Spark does to its columns."""

    def __init__(self, path: Path, mode: str, partition_by: list[str] | None = None, **configuration: str) -> None:
        self.path = path / "t"
        given = {"delta.columnMapping.mode": mode, **configuration}
        DeltaTable.create(self.path, COLUMNS, partition_by=partition_by or [], configuration=given)

    @property
    def table(self) -> DeltaTable:
        return DeltaTable(self.path)

    @property
    def schema(self) -> pa.Schema:
        return DeltaSource(self.path).schema

    def log(self, *actions: dict[str, Any]) -> None:
        path = self.path / f"_delta_log/{self.table.version() + 1:020d}.json"
        path.write_text("\n".join(map(json.dumps, actions)))

    def alter(self, change: Callable[[dict[str, Any]], None]) -> None:
        """Commit changed metadata. `change` gets it, with the schema decoded."""
        found = self.table.metadata()
        described: dict[str, Any] = {
            "id": str(found.id), "partitionColumns": found.partition_columns, "format": {"provider": "parquet", "options": {}},
            "configuration": dict(found.configuration), "schema": json.loads(self.table.schema().to_json()),
        }  # fmt: skip
        change(described)
        described["schemaString"] = json.dumps(described.pop("schema"))
        self.log({"metaData": described})

    def rename(self, old: str, new: str) -> None:
        def change(metadata: dict[str, Any]) -> None:
            fields = metadata["schema"]["fields"]
            outer, _, inner = old.partition(".")
            if inner:
                fields = next(field for field in fields if field["name"] == outer)["type"]["fields"]
            next(field for field in fields if field["name"] == (inner or outer))["name"] = new
            metadata["partitionColumns"] = [new if name == old else name for name in metadata["partitionColumns"]]

        self.alter(change)

    def drop(self, name: str) -> None:
        def change(metadata: dict[str, Any]) -> None:
            fields = metadata["schema"]["fields"]
            fields.remove(next(field for field in fields if field["name"] == name))

        self.alter(change)

    def add(self, name: str, kind: str = "long") -> None:
        def change(metadata: dict[str, Any]) -> None:
            configuration = metadata["configuration"]
            highest = int(configuration["delta.columnMapping.maxColumnId"]) + 1
            configuration["delta.columnMapping.maxColumnId"] = str(highest)
            mapped = {"delta.columnMapping.id": highest, "delta.columnMapping.physicalName": f"col-{uuid.uuid4()}"}
            metadata["schema"]["fields"].append({"name": name, "type": kind, "nullable": True, "metadata": mapped})

        self.alter(change)

    def append(self, *numbers: int) -> None:
        write_deltalake(self.path, pa.table(rows_of(self.schema, *numbers)), mode="append")

    def rows(self) -> list[dict[str, Any]]:
        """The rows as another reader finds them."""
        names = ", ".join(f'"{name}"' for name in self.schema.names)
        found = QueryBuilder().register("t", self.table).execute(f"SELECT {names} FROM t").read_all()
        return in_order(pa.table(found).to_pylist())

    def sink(self, schema: pa.Schema | None = None, *, restoring: bool = False, **options: Any) -> DeltaSink:
        sink = DeltaSink(self.path, append=True, **options)
        sink.validate(schema or self.schema, restoring=restoring)
        return sink


def in_order(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["n"], str(row)))


@pytest.fixture(params=MODES)
def mapped(request: pytest.FixtureRequest, tmp_path: Path) -> Mapped:
    return Mapped(tmp_path, request.param, ["part"])


def changed(world: Mapped) -> None:
    """What `Mapped.rename` and its like can do, with rows before and after each change."""
    world.append(1, 2)
    world.rename("part", "zone")
    world.rename("s.x", "y")
    world.append(3, 4)
    world.drop("at")
    world.add("at", "string")
    world.add("late")
    world.append(5, 6)
    world.rename("late", "n2")


# ---- reading -----------------------------------------------------------------


def test_columns_that_were_renamed_dropped_and_added_are_found_in_old_files(mapped):
    changed(mapped)
    rows = Job(DeltaSource(mapped.path)).rows()
    assert in_order(rows) == mapped.rows()
    assert rows[0].keys() == {"n", "zone", "s", "at", "n2"}
    assert [(row["at"], row["n2"]) for row in in_order(rows)][:4] == [(None, None)] * 4
    some = Job(DeltaSource(mapped.path, columns=["n2", "zone"])).rows()
    assert sorted(map(str, some)) == sorted(str({"n2": row["n2"], "zone": row["zone"]}) for row in rows)
    assert in_order(Job(DeltaSource(mapped.path, start=0)).rows()) == in_order(rows)


def test_a_source_goes_on_under_the_old_names_when_columns_are_renamed(mapped):
    mapped.append(1)
    job = Job(DeltaSource(mapped.path, watch=True))
    first = job.rows()
    mapped.rename("part", "zone")
    mapped.rename("s.x", "y")
    mapped.append(2)
    assert [*first, *job.rows()] == rows_of(COLUMNS, 1, 2).to_pylist()
    mapped.rename("n", "part")
    with pytest.raises(SchemaError, match="column 'n' was dropped"):
        mapped.drop("part")
        job.splits()


def test_a_column_that_was_dropped_and_added_again_is_another_one(mapped):
    mapped.append(1)
    job = Job(DeltaSource(mapped.path, watch=True))
    job.rows()
    mapped.drop("at")
    mapped.add("at", "timestamp")
    with pytest.raises(SchemaError, match="column 'at' was dropped"):
        job.splits()


@pytest.mark.parametrize("changes", [False, True])
def test_a_job_does_not_resume_with_another_column_of_the_same_name(mapped, changes):
    """Rows that were added before it came would have no value there."""
    mapped.append(1)

    def source(*columns: str) -> DeltaSource:
        return DeltaSource(mapped.path, columns=columns, watch=True, changes=changes)

    job = Job(source("n", "at"))
    job.splits()
    assert job.position is not None
    source("at", "n").check_resume(job.position)
    mapped.rename("at", "was")
    mapped.add("at", "timestamp")
    source("n", "was").check_resume(job.position)
    with pytest.raises(ConfigError, match=r"'at' is not the one.*is called 'was' now: read it by that name"):
        source("n", "at").check_resume(job.position)
    mapped.drop("was")
    with pytest.raises(ConfigError, match=r"'at' is not the one.*which was dropped: leave 'at' out"):
        source("n", "at").check_resume(job.position)
    source("n").check_resume(job.position)


def test_a_split_keeps_its_partition_when_the_column_is_renamed_before_it_is_read(mapped):
    mapped.append(1, 2)
    splits = Job(DeltaSource(mapped.path)).splits()
    mapped.rename("part", "zone")
    again = DeltaSource(mapped.path)
    assert in_order([row for split in splits for row in read(again, split)]) == mapped.rows()
    source = DeltaSource(mapped.path)
    mapped.rename("zone", "area")
    assert [row["zone"] for row in in_order(Job(source).rows())] == ["p1", "p2"]


def test_the_earliest_event_time_of_a_file_is_found(mapped):
    mapped.append(7_000_000, 8_000_000)
    context = DiscoveryContext("in", 2, None, event_time="at")
    assert {split.min_time_us for split in DeltaSource(mapped.path).discover(None, context).splits} == {
        7_000_000,
        8_000_000,
    }
    source = DeltaSource(mapped.path, start=1, watch=True)
    assert {split.min_time_us for split in source.discover(None, context).splits} == {7_000_000, 8_000_000}


def test_ids_count_and_not_names_in_a_table_that_says_so(tmp_path):
    world = Mapped(tmp_path, "id")
    stored = DeltaSource(world.path)._mapping.stored(COLUMNS)
    names = ["old n", stored.names[3], "s", stored.names[1]]
    named = pa.schema([field.with_name(name) for field, name in zip(stored, names, strict=True)])
    rows = rows_of(COLUMNS, 1, 2, 3)

    def add(name: str, rows: pa.RecordBatch) -> None:
        pq.write_table(pa.table(rows), world.path / name)
        size = (world.path / name).stat().st_size
        add = {"path": name, "size": size, "partitionValues": {}, "modificationTime": 1, "dataChange": True}
        world.log({"add": add})

    add("named-otherwise.parquet", as_in_files(rows, named))
    assert Job(DeltaSource(world.path)).rows() == rows.to_pylist()
    add("without-ids.parquet", rows)
    with pytest.raises(DataError, match=r"without-ids.parquet: its columns have no field ids"):
        Job(DeltaSource(world.path, columns=["n"])).rows()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_versions_before_column_mapping_was_removed_are_refused(tmp_path, mode, again):
    mapped = Mapped(tmp_path, mode)
    mapped.append(1)
    job = Job(DeltaSource(mapped.path, watch=True))
    job.rows()
    mapped.append(2)

    def remove(metadata: dict[str, Any]) -> None:
        metadata["configuration"] = {}
        for field in metadata["schema"]["fields"]:
            field["metadata"] = {}

    def map_again(metadata: dict[str, Any]) -> None:
        metadata["configuration"] = {"delta.columnMapping.mode": mode, "delta.columnMapping.maxColumnId": "9"}
        fields = metadata["schema"]["fields"]
        fields.pop()  # the struct, whose fields would have names too
        for number, field in enumerate(fields, 1):
            names = {"delta.columnMapping.id": number, "delta.columnMapping.physicalName": field["name"]}
            field["metadata"] = names

    changes = DeltaSource(mapped.path, changes=True, watch=True, interval="1 ms")
    (split,) = changes.discover(None, CONTEXT).splits
    reader = changes.open_split(split)
    found = reader.read(100)
    assert found is not None
    mapped.append(3)
    mapped.alter(remove)
    if again:
        mapped.alter(map_again)
    read_on = Split(split.id, split.payload, found[1])
    for begin in (
        lambda: DeltaSource(mapped.path, start=1).prepare("in", None, False),
        lambda: Job(DeltaSource(mapped.path), job.position).rows(),
        lambda: DeltaSource(mapped.path, changes=True, watch=True).open_split(split),
        lambda: DeltaSource(mapped.path, changes=True, watch=True).open_split(read_on),
    ):
        with pytest.raises(
            ConfigError, match=r"version \d is to be read on from, and version 4 has removed column mapping"
        ):
            begin()
    newest = mapped.table.version()
    assert DeltaSource(mapped.path, start=newest + 1, watch=True).discover(None, CONTEXT).splits == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda metadata: metadata["configuration"].update({"delta.columnMapping.mode": "other"}),
            "mode is 'other'; only",
        ),
        (lambda metadata: metadata["schema"]["fields"][0].update(metadata={}), "its column 'n' no physical name or id"),
    ],
)
def test_a_mapping_that_is_not_known_or_not_complete_is_refused(tmp_path, change, said):
    world = Mapped(tmp_path, "name")
    job = Job(DeltaSource(world.path, watch=True))
    job.rows()
    world.alter(change)
    with pytest.raises(ConfigError, match=said):
        job.splits()


# ---- writing -----------------------------------------------------------------

STEPS = st.lists(
    st.sampled_from(["append", "other", "rename", "rename inner", "rename part", "add", "drop", "compact"]), max_size=10
)


@pytest.mark.parametrize("keyed", [False, True])
@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(mode=st.sampled_from(MODES), partitioned=st.booleans(), feed=st.booleans(), steps=STEPS)
def test_rows_are_in_the_table_whatever_happens_to_its_columns(keyed, mode, partitioned, feed, steps):
    """Each row is found where its column is now, by our reader and by another one."""
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(compaction, "FILES_MIN", 2)
        configuration = {"delta.enableChangeDataFeed": "true"} if feed else {}
        world = Mapped(Path(directory), mode, ["part"] if partitioned else [], **configuration)
        expected: list[dict[str, Any]] = []
        names = {name: name for name in COLUMNS.names}
        for number, step in enumerate([*steps, "append"], 1):
            if step in ("append", "other"):
                rows = rows_of(world.schema, number, number + 100, 1000)
                if step == "append":
                    key: dict[str, Any] = {"key": ["n"]} if keyed else {}
                    sink = world.sink(auto_compact=True, **key)
                    committer = committer_of(sink, "job-a")
                    committer.commit(number, written(sink, rows, number, attempt=number))
                    committer.close()
                    if keyed:
                        expected = [row for row in expected if row["n"] not in rows.column(0).to_pylist()]
                else:
                    rows = rows.slice(0, 2)
                    write_deltalake(world.path, pa.table(rows), mode="append")
                expected += rows.to_pylist()
            elif step == "compact":
                compactor = committer_of(world.sink(auto_compact=True), "job-a")._compactor
                while compactor.compact_once() is not None:
                    pass
            elif step == "add":
                world.add(f"c{number}")
                expected = [{**row, f"c{number}": None} for row in expected]
            elif step == "drop" and world.schema.names[-1].startswith("c"):
                gone = world.schema.names[-1]
                world.drop(gone)
                expected = [{name: value for name, value in row.items() if name != gone} for row in expected]
            elif step.startswith("rename"):
                old = {"rename": "at", "rename inner": "s", "rename part": "part"}[step]
                if step == "rename inner":
                    inner = world.schema.field(names["s"]).type.field(0).name
                    world.rename(f"{names['s']}.{inner}", f"x{number}")
                    for row in expected:
                        if row["s"] is not None:
                            row["s"] = {f"x{number}": row["s"][inner], "l": row["s"]["l"]}
                else:
                    world.rename(names[old], f"{old}{number}")
                    expected = [
                        {f"{old}{number}" if name == names[old] else name: value for name, value in row.items()}
                        for row in expected
                    ]
                    names[old] = f"{old}{number}"
        want = in_order([{name: row[name] for name in world.schema.names} for row in expected])
        assert in_order(Job(DeltaSource(world.path)).rows()) == want
        assert world.rows() == want


def test_files_that_wait_are_committed_after_their_columns_were_renamed_and_not_after_one_was_dropped(mapped):
    for superseded in (False, True):
        sink = mapped.sink(restoring=True)
        number = 10 if superseded else 1
        waiting = written(sink, rows_of(mapped.schema, number), number, attempt=number)
        mapped.rename(mapped.schema.names[1], f"zone{number}")
        before = mapped.rows()
        job = ("job-b", mapped.sink(restoring=True)) if superseded else ("job-a", sink)
        committer_of(job[1], job[0]).commit(number, waiting)
        assert len(mapped.rows()) == len(before) + 1
        assert in_order(Job(DeltaSource(mapped.path)).rows()) == mapped.rows()
    sink = mapped.sink(restoring=True)
    waiting = written(sink, rows_of(mapped.schema, 20), 20, attempt=20, job_id="job-b")
    mapped.drop("at")
    mapped.add("at", "timestamp")
    with pytest.raises(SchemaError, match=r"column 'at' was timestamp.* in the table when .* and no longer exists"):
        committer_of(sink, "job-b").commit(20, waiting)


def test_what_deltalake_cannot_do_to_such_a_table_is_refused_before_anything_is_written(mapped):
    more = COLUMNS.append(pa.field("new", pa.int64()))
    with pytest.raises(ConfigError, match="deltalake does not add columns to tables with column mapping"):
        mapped.sink(more, evolve=True)
    sink = mapped.sink()
    committer = committer_of(sink, "job-a")
    for number in (1, 2):
        committer.commit(number, written(sink, rows_of(COLUMNS, number), number, attempt=number))
    sink.check_rollback(OUTPUT, 1)
    sink.roll_back(OUTPUT, 1, [])
    assert [row["n"] for row in mapped.rows()] == [1]


def test_a_table_whose_columns_have_changed_since_is_not_rolled_back(mapped):
    sink = mapped.sink()
    committer = committer_of(sink, "job-a")
    committer.commit(1, written(sink, rows_of(COLUMNS, 1), 1))
    committer.commit(2, written(sink, rows_of(COLUMNS, 2), 2, attempt=2))
    mapped.rename("part", "zone")
    with pytest.raises(
        ConfigError, match=r"columns of the table have changed since version 1|other writers have changed"
    ):
        sink.check_rollback(OUTPUT, 1)
    assert [row["n"] for row in mapped.rows()] == [1, 2]


@pytest.mark.parametrize("superseded", [False, True])
@pytest.mark.parametrize("key", [(), ("n",)])
def test_rows_that_wait_stay_in_their_columns_when_these_swap_names(mapped, key, superseded):
    """Also if one is the key, and within a struct: a merge looks for columns by name."""
    mapped.add("m")
    mapped.alter(lambda metadata: _add_inner(metadata, "y"))
    schema = mapped.schema
    row = {"n": 1, "part": "p", "at": None, "s": {"x": 7, "l": [{"z": "t"}], "y": 8}, "m": 10}
    sink = mapped.sink(key=key)
    waiting = written(sink, pa.RecordBatch.from_pylist([row], schema), 1)
    for one, other in (("n", "m"), ("s.x", "y")):
        outer = one.rpartition(".")[0]
        mapped.rename(one, "tmp")
        mapped.rename(f"{outer}.{other}".lstrip("."), one.rpartition(".")[2])
        mapped.rename(f"{outer}.tmp".lstrip("."), other)
    job = ("job-b", mapped.sink(key=("m",) if key else (), restoring=True)) if superseded else ("job-a", sink)
    committer_of(job[1], job[0]).commit(1, waiting)
    assert mapped.rows() == [{"m": 1, "part": "p", "at": None, "s": {"y": 7, "l": [{"z": "t"}], "x": 8}, "n": 10}]
    assert Job(DeltaSource(mapped.path)).rows() == mapped.rows()


def _add_inner(metadata: dict[str, Any], name: str) -> None:
    configuration = metadata["configuration"]
    highest = int(configuration["delta.columnMapping.maxColumnId"]) + 1
    configuration["delta.columnMapping.maxColumnId"] = str(highest)
    mapped = {"delta.columnMapping.id": highest, "delta.columnMapping.physicalName": f"col-{uuid.uuid4()}"}
    inner = next(field for field in metadata["schema"]["fields"] if field["name"] == "s")["type"]["fields"]
    inner.append({"name": name, "type": "long", "nullable": True, "metadata": mapped})
