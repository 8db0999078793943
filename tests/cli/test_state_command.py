"""`midstream state` and `read_state`: the entries of every kind of state, from the files of a checkpoint."""

from __future__ import annotations

import json
import shutil
import zipfile
from datetime import datetime
from operator import itemgetter
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import jsonschema
import polars as pl
import pyarrow as pa
import pytest

from midstream import (
    ConfigError,
    Environment,
    KeyedBatchFunction,
    KeyedProcessFunction,
    ProcessSlots,
    StorageError,
    TableState,
    ValueState,
    read_state,
    write_savepoint,
)
from midstream.cli.commands import state as command
from midstream.cli.json_schema import schema
from midstream.cli.main import main
from midstream.runtime.storage import stored_checkpoint
from midstream.runtime.storage.stored_checkpoint import open_checkpoint
from mutated_checkpoints import ROWS, Base
from released_job import FOLDER, STATE
from waiting import until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    with zipfile.ZipFile(FOLDER / "0.1.0.zip") as archive:
        archive.extractall(tmp_path / "job")
    return tmp_path / "job" / "state"


def test_every_state_of_every_kind_is_read(root: Path) -> None:
    states = open_checkpoint(str(root)).states
    assert {(state.uid, state.part) for state in states} >= {
        (uid, part) for uid, parts in STATE.items() for part in parts
    }
    for state in states:
        found = read_state(str(root), state.uid, state.part)
        frame = found.collect()
        assert frame.schema == found.collect_schema()
        assert 0 < frame.height <= state.rows
        assert "__key_group" not in frame.columns


def test_the_entries_of_a_key_belong_together(root: Path) -> None:
    numbers = read_state(str(root), "keyed", "number").collect()
    assert numbers.columns == ["k", "number"] and numbers["k"].is_unique().all()
    items = read_state(str(root), "keyed", "items")
    counted = items.group_by("k").agg(number=pl.len().cast(pl.Int64), last=pl.col("position").max() + 1)
    joined = numbers.join(counted.collect(), on="k", how="full", suffix="_counted")
    assert (joined["number"] == joined["number_counted"]).all() and (joined["number"] == joined["last"]).all()
    typed = read_state(str(root), "keyed", "typed").collect()
    assert typed.columns == ["k", "map_key", "typed"] and not typed.select("k", "map_key").is_duplicated().any()
    rules = read_state(str(root), "ruled", "rules").collect()
    assert rules.columns == ["map_key", "rules"] and rules["map_key"].is_unique().all()
    timers = read_state(str(root), "keyed", "timers:event").collect()
    assert timers.columns == ["k", "time"] and set(timers["k"]) == set(numbers["k"])
    assert timers.schema["time"] == pl.Datetime("us", "UTC")


def test_rows_and_columns_that_are_not_requested_are_left_out(root: Path) -> None:
    whole = read_state(str(root), "keyed", "items").collect()
    key = whole["k"][-1]
    some = read_state(str(root), "keyed", "items").filter(pl.col("k") == key).select("items")
    assert some.collect().equals(whole.filter(pl.col("k") == key).select("items"))
    for rows in (0, 1, whole.height - 1, whole.height, whole.height + 1):
        assert read_state(str(root), "keyed", "items").head(rows).collect().equals(whole.head(rows))
    assert read_state(str(root), "keyed", "items").select(pl.len()).collect().item() == whole.height


def test_untyped_values_are_shown_as_the_bytes_that_they_are(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert read_state(str(root), "keyed", "thing").collect().schema["thing"] == pl.Binary
    assert main(["state", str(root), "keyed", "thing", "--json"]) == 0
    assert all(entry["thing"].startswith("b'") for entry in json.loads(capsys.readouterr().out)["entries"])


def validated(capsys: pytest.CaptureFixture[str]) -> Any:
    """What the command has printed for programs, which is as docs/json.schema.json has it."""
    shown = json.loads(capsys.readouterr().out)
    defined = json.loads(schema())["$defs"]
    jsonschema.Draft202012Validator({"$ref": "#/$defs/state", "$defs": defined}).validate(shown)
    return shown


def test_the_command_lists_states_and_shows_entries(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", str(root)]) == 0
    out = capsys.readouterr().out
    assert all(uid in out for uid in STATE)
    assert main(["state", str(root), "keyed", "number", "--where", "k = 1"]) == 0
    assert "1 entry of number" in capsys.readouterr().out
    assert main(["state", str(root), "--json"]) == 0
    validated(capsys)
    for checkpoint in (root, next(root.glob("chk-*"))):
        assert main(["state", str(checkpoint), "keyed", "number", "--rows", "2", "--json"]) == 0
        shown = validated(capsys)
        assert [column["name"] for column in shown["columns"]] == ["k", "number"]
        assert len(shown["entries"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nope"], "no operator with the uid 'nope' has state there; operators with state: 'rows'"),
        (["keyed"], "has several states, so name one of them: 'items'"),
        (["keyed", "nope"], "has no state 'nope' there; it has 'items'"),
        (["keyed", "number", "--where", "j = 1"], "not a condition in SQL on the columns of 'number' (k Int64, number"),
        (["keyed", "number", "--where", "k +"], "not a condition in SQL"),
        (["keyed", "number", "--where", "k"], "its values are Int64, not true or false"),
        (["keyed", "number", "--where", "k = 'a'"], "not a condition in SQL"),
        (
            ["keyed", "timers:event", "--where", "time < '2024-01-01'"],
            "DATE '2024-01-31', TIMESTAMP '2024-01-31 12:00:00'",
        ),
        (["keyed", "number", "--rows", "0"], "--rows: 0 is not from 1 to"),
        (["--where", "k = 1"], "give the uid of its operator"),
    ],
)
def test_what_is_not_there_is_refused_with_what_is(
    root: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["state", str(root), *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("where", "count"),
    [("at > TIMESTAMPTZ '2024-06-01 12:00:00Z'", 1), ("at = TIMESTAMPTZ '2024-07-01 10:00:00Z' AND n = 2", 1)]
    + [("n < 3", 2), ("at > TIMESTAMPTZ '2024-07-01 10:00:00Z'", 0)],
)
def test_times_in_any_zone_are_compared_and_shown_in_their_own(
    where: str, count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Kept(KeyedProcessFunction):
        n = ValueState(int)

        def process(self, row: Any, ctx: Any) -> Any:
            return None

    zone = ZoneInfo("Europe/Berlin")
    env = Environment("zoned")
    rows = env.from_collection([], schema={"at": pl.Datetime("us", "Europe/Berlin")})
    rows.key_by("at").process(Kept(), {"n": int}).uid("kept").collect()
    at = [datetime(2024, 1, 1, 12, tzinfo=zone), datetime(2024, 7, 1, 12, tzinfo=zone)]
    path = write_savepoint(tmp_path / "saved", like=env, states={("kept", "n"): pl.DataFrame({"at": at, "n": [1, 2]})})
    assert main(["state", path, "kept", "n", "--where", where, "--json"]) == 0
    shown = validated(capsys)
    assert "Europe/Berlin" in shown["columns"][0]["type"]
    assert len(shown["entries"]) == count
    assert all(entry["at"].endswith(("12:00:00+01:00", "12:00:00+02:00")) for entry in shown["entries"])


@pytest.fixture
def with_rows_in_flight(tmp_path: Path) -> Path:
    """A checkpoint in which each subtask was to process the first six rows of its keys, twice."""
    Base("functions").mutant.write(tmp_path)
    return tmp_path


def test_rows_in_flight_are_read_as_state_of_the_operator_that_had_not_processed_them(
    with_rows_in_flight: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(with_rows_in_flight)
    found = read_state(path, "everything", "in_flight")
    expected = pl.DataFrame([row for row in ROWS[:6] for _ in range(2)])
    assert found.collect().select(expected.columns).sort("x").equals(expected)
    assert found.collect().schema == found.collect_schema()
    assert found.filter(pl.col("x") == 3).select("name").collect()["name"].to_list() == ["n3", "n3"]
    assert main(["state", path]) == 0
    assert "in_flight" in capsys.readouterr().out
    assert main(["state", path, "everything", "in_flight", "--where", "x > 4", "--json"]) == 0
    assert [entry["x"] for entry in validated(capsys)["entries"]] == [5, 5]


def test_what_is_read_without_a_name_does_not_depend_on_whether_rows_are_in_flight(tmp_path: Path) -> None:
    mutant = Base("aggregates").mutant
    mutant.write(tmp_path)
    [_, in_flight] = [state.name for state in open_checkpoint(str(tmp_path)).states if state.uid == "counted"]
    assert in_flight == "in_flight"
    with_them = read_state(str(tmp_path), "counted").collect()
    mutant.metadata["channels"] = []
    mutant.write(tmp_path)
    assert with_them.equals(read_state(str(tmp_path), "counted").collect())


def test_rows_in_flight_are_not_read_as_state_that_has_no_entries(tmp_path: Path) -> None:
    mutant = Base("aggregates").mutant
    for operator in mutant.metadata["operators"]:
        for subtask in operator["subtasks"]:
            subtask["parts"] = []
    mutant.write(tmp_path)
    with pytest.raises(ConfigError, match=r"'counted' has no state there but rows in flight, so name .*: 'in_flight'"):
        read_state(str(tmp_path), "counted")
    assert read_state(str(tmp_path), "counted", "in_flight").collect().height == 12


@pytest.mark.parametrize("has_entries", [True, False])
def test_a_state_may_be_called_in_flight(has_entries: bool, tmp_path: Path) -> None:
    mutant = Base("functions").mutant
    [operator] = [each for each in mutant.metadata["operators"] if each["uid"] == "everything"]
    operator["forms"] = [[part.replace("number", "in_flight"), form] for part, form in operator["forms"]]
    for subtask in operator["subtasks"]:
        subtask["parts"] = [part for part in subtask["parts"] if has_entries or part["name"] != "value:number"]
        for part in subtask["parts"]:
            part["name"] = part["name"].replace("number", "in_flight")
    mutant.write(tmp_path)
    assert read_state(str(tmp_path), "everything", "in_flight_").collect().height == 12
    if has_entries:
        assert read_state(str(tmp_path), "everything", "in_flight").collect().columns == ["k", "name", "in_flight"]
    else:
        with pytest.raises(ConfigError, match="no state 'in_flight' there"):
            read_state(str(tmp_path), "everything", "in_flight")


COLUMNS = [("k", pa.int64()), ("name", pa.large_string()), ("at", pa.timestamp("us")), ("x", pa.int64())]


@pytest.mark.parametrize(
    ("keys", "columns", "key_groups"),
    [
        (["k", "nope"], COLUMNS, None),
        ([], COLUMNS, [0, 16]),
        ([], [*COLUMNS[:3], ("k", pa.int64())], None),
        (["k"], [*COLUMNS[:3], ("k", pa.int64())], [0, 16]),
    ],
)
def test_crafted_columns_of_rows_in_flight_are_refused(
    keys: list[str], columns: list[Any], key_groups: list[int] | None, tmp_path: Path
) -> None:
    mutant = Base("functions").mutant
    [edge] = mutant.metadata["edges"]
    edge |= {"keys": keys, "layouts": [pa.schema(columns).serialize().to_pybytes()]}
    for channel in mutant.metadata["channels"]:
        channel["key_groups"] = key_groups
    mutant.write(tmp_path)
    with pytest.raises(StorageError, match=r"'in_flight' of operator 'everything': the columns .* cannot be read"):
        read_state(str(tmp_path), "everything", "in_flight")


def test_a_path_with_a_nul_is_refused() -> None:
    with pytest.raises(ConfigError, match="a path cannot have a NUL in it"):
        read_state("a\0b", "keyed")


def test_a_directory_without_a_checkpoint_and_a_damaged_file_are_named(root: Path, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="does not exist or is empty"):
        read_state(str(tmp_path / "nothing"), "keyed")
    with pytest.raises(ConfigError, match="the path is a string"):
        read_state(7, "keyed")  # type: ignore[arg-type]
    whole = read_state(str(root), "keyed", "items")
    for file in (root / "shared").glob("*.state"):
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(StorageError, match=r"state 'list:items' of operator 'keyed': chunk .* bytes"):
        whole.collect()


def test_a_newer_checkpoint_is_read_when_a_running_job_has_deleted_this_one(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stale = root.parent / "stale"
    shutil.copytree(root, stale)
    given = iter([open_checkpoint(str(stale))])
    shutil.rmtree(stale / "shared")
    fresh = stored_checkpoint.open_checkpoint
    monkeypatch.setattr(command, "open_checkpoint", lambda path: next(given, None) or fresh(path))
    assert main(["state", str(root), "keyed", "items", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"].startswith(str(root))


def test_values_that_python_or_json_lacks_are_shown_as_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Rows(KeyedBatchFunction):
        rows = TableState(
            {"k": int, "at": pa.timestamp("us"), "ratios": pa.list_(pa.float64()), "took": pa.duration("ns")}
        )

        def process(self, rows: Any, ctx: Any) -> Any:
            return None

    env = Environment("odd")
    stream = env.from_collection([], schema={"k": int})
    stream.key_by("k").process_batches(Rows(), {"k": int}).uid("odd").collect()
    frame = pl.DataFrame(
        {"k": [1, 2], "at": [-(2**56), None], "ratios": [[float("nan"), float("-inf"), 1.5], None], "took": [5, None]},
        schema={"k": pl.Int64, "at": pl.Datetime("us"), "ratios": pl.List(pl.Float64), "took": pl.Duration("ns")},
    )
    path = write_savepoint(tmp_path / "saved", like=env, states={("odd", "rows"): frame})
    assert main(["state", path, "odd", "rows", "--json"]) == 0
    first, second = sorted(validated(capsys)["entries"], key=itemgetter("k"))
    assert first["ratios"] == ["nan", "-inf", 1.5] and first["at"].startswith("-0314") and "5" in first["took"], first
    assert second == {"k": 2, "at": None, "ratios": None, "took": None}
    assert main(["state", path, "odd", "rows"]) == 0
    assert main(["state", path, "odd", "rows", "--where", "k = '\udcff'"]) == 2
    assert "is not text in UTF-8" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "~"])
def test_what_is_neither_a_directory_nor_a_job_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["state", name]) == 2
    assert "there is no such directory, and no job with this name or id runs here" in capsys.readouterr().err


def test_a_running_job_is_named_instead_of_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    env = Environment("endless", checkpoint_dir="state")
    rows = env.generate(lambda i: {"k": i % 3, "n": i}, rows_per_s=1000)
    rows.key_by("k").process(Counted(), {"k": int}).uid("counted").write_jsonl("out")
    job = env.start(slots=ProcessSlots(1))

    def entries() -> list[Any]:
        assert main(["checkpoint", "endless"]) == 0
        main(["state", "endless", "counted", "n", "--json"])
        return list(json.loads(capsys.readouterr().out.splitlines()[-1]).get("entries", ()))

    try:
        until("a checkpoint has rows of every key", lambda: len(entries()) == 3)
        assert main(["state", "endless", "counted", "n", "--json"]) == 0
        assert {entry["k"] for entry in validated(capsys)["entries"]} == {0, 1, 2}
        (tmp_path / "elsewhere").mkdir()
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert main(["inspect", job.job_id, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["job_name"] == "endless"
    finally:
        job.stop()
    assert main(["state", "endless"]) == 2
    assert "'endless': there is no such directory, and no job with this name or id runs here" in capsys.readouterr().err


class Counted(KeyedProcessFunction):
    n = ValueState(int, default=0)

    def process(self, row: Any, ctx: Any) -> Any:
        self.n.value += 1
