"""What a checkpoint holds of a source whose uid another kind of source has now: refused, for trying again cannot help."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
import pytest
from table_worlds import WORLDS

from midstream import Environment
from midstream.connectors.common.hybrid_source import HybridSource
from midstream.connectors.files.file_source import FileSource
from midstream.connectors.memory.collection_source import from_rows
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.operators.sink_api import decoded
from midstream.engine.operators.source_api import DiscoveryContext, Source, Split, decoded_splits
from midstream.runtime.process.process_slots import ProcessSlots

CONTEXT = DiscoveryContext("in", 1, None)
WRITTEN_BY_ANOTHER = "was written by another kind of source .*give this one a new uid"


def generator() -> Source:
    return GeneratorSource(lambda i: {"n": np.asarray(i)}, count=10)


def files(directory, watch: bool = False) -> Source:
    pl.DataFrame({"n": [1]}).write_parquet(directory / "a.parquet")
    return FileSource(str(directory), watch=watch)


def first_split(source: Source) -> Split:
    return source.discover(None, CONTEXT).splits[0]


def test_splits_of_another_source_are_refused(tmp_path):
    of_generator, of_files = first_split(generator()), first_split(files(tmp_path))
    with pytest.raises(ConfigError, match=f"FileSource: .*{WRITTEN_BY_ANOTHER}"):
        files(tmp_path).open_split(of_generator)
    with pytest.raises(ConfigError, match=f"GeneratorSource: .*{WRITTEN_BY_ANOTHER}"):
        generator().open_split(of_files)
    with pytest.raises(ConfigError, match=f"CollectionSource: .*{WRITTEN_BY_ANOTHER}"):
        from_rows([{"n": 1}]).open_split(of_files)


def test_texts_that_are_not_utf8_are_refused(tmp_path):
    split = first_split(files(tmp_path))
    with pytest.raises(ConfigError, match=WRITTEN_BY_ANOTHER):
        files(tmp_path).open_split(Split("a", split.payload.replace(b"a.parquet", b"\xff" * 9)))
    damaged = msgspec.msgpack.encode(Split("abcd", b"")).replace(b"abcd", b"\xff" * 4)
    with pytest.raises(StorageError, match="in: the splits in the checkpoint are damaged"):
        decoded_splits([damaged], "in")
    with pytest.raises(StorageError, match="in: what the checkpoint has to commit was not prepared by a file sink"):
        decoded(damaged, Split, "a file sink", "in")


def test_files_that_were_read_once_are_not_watched_from_there(tmp_path):
    once = files(tmp_path).discover(None, CONTEXT)
    assert once.exhausted
    with pytest.raises(ConfigError, match=r"is of a job that read the files once.*start with --fresh"):
        files(tmp_path, watch=True).discover(once.position, CONTEXT)
    with pytest.raises(ConfigError, match=r"is of a job that read the files once.*start with --fresh"):
        files(tmp_path, watch=True).check_resume(once.position)


def test_a_position_of_another_source_is_refused(tmp_path):
    after = generator().discover(None, CONTEXT).position
    with pytest.raises(ConfigError, match=f"FileSource: .*{WRITTEN_BY_ANOTHER}"):
        files(tmp_path, watch=True).discover(after, CONTEXT)


@pytest.mark.parametrize("watch", [False, True])
@pytest.mark.parametrize("kind", WORLDS)
def test_tables_refuse_positions_of_other_sources_and_in_other_tables(tmp_path, kind, watch):
    worlds = {}
    (plain := tmp_path / "plain").mkdir()
    for name in ("one", "two"):
        for each in WORLDS:
            (tmp_path / name / each).mkdir(parents=True)
            worlds[name, each] = WORLDS[each](tmp_path / name / each)
            worlds[name, each].create()
            worlds[name, each].append(1)
    source = worlds["one", kind].source(watch=watch)
    others = [generator(), files(plain), *(worlds["two", each].source() for each in WORLDS if each != kind)]
    for other in others:
        with pytest.raises(ConfigError, match=f"Source: .*{WRITTEN_BY_ANOTHER}"):
            source.discover(other.discover(None, CONTEXT).position, CONTEXT)
    in_another = worlds["two", kind].source().discover(None, CONTEXT).position
    with pytest.raises(ConfigError, match=r"the table was (replaced by another one|dropped and made again).*--fresh"):
        source.discover(in_another, CONTEXT)


# ---- the same kind of source with other input ----


def position_of(source: Source) -> bytes:
    found = source.discover(None, CONTEXT).position
    assert found is not None
    return found


def test_files_read_once_are_not_those_of_another_path(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    one.check_resume(position_of(one))
    one.check_resume(b"files read once")  # of a version that did not note the paths
    with pytest.raises(ConfigError, match=r"job that read .*/one .*and now the source has .*/two .*--fresh"):
        two.check_resume(position_of(one))
    both = FileSource([tmp_path / "two", tmp_path / "one"])
    both.check_resume(position_of(FileSource([tmp_path / "one", tmp_path / "two"])))
    with pytest.raises(ConfigError, match=r"job that read .*/one .*and now the source has .*/one and 1 more paths"):
        both.check_resume(position_of(one))
    with pytest.raises(ConfigError, match=WRITTEN_BY_ANOTHER):
        one.check_resume(position_of(generator()))


def test_files_that_were_watched_are_read_to_the_end_of_the_directory(tmp_path):
    position = position_of(watched := files(tmp_path, watch=True))
    watched.check_resume(position)
    pl.DataFrame({"n": [2]}).write_parquet(tmp_path / "b.parquet")
    once = FileSource(str(tmp_path))
    once.check_resume(position)
    found = once.discover(position, CONTEXT)
    assert [split.id.rpartition("/")[2] for split in found.splits][-1] == "b.parquet"
    assert found.exhausted
    assert not once.discover(found.position, CONTEXT).splits
    watched.check_resume(found.position)


@pytest.mark.parametrize("kind", WORLDS)
def test_a_table_that_was_watched_is_read_to_its_newest_version(tmp_path, kind):
    world = WORLDS[kind](tmp_path)
    world.create()
    world.append(1)
    position = position_of(world.source(watch=True))
    world.append(2)
    found = world.source().discover(position, CONTEXT)
    assert found.exhausted
    assert len(found.splits) == 1
    assert not world.source().discover(found.position, CONTEXT).splits


@pytest.mark.parametrize("kind", WORLDS)
def test_another_table_is_refused_even_if_all_of_it_was_read(tmp_path, kind):
    worlds = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        worlds.append(WORLDS[kind](tmp_path / name))
        worlds[-1].create()
    position = position_of(worlds[0].source())
    worlds[0].source(watch=True).check_resume(position)
    with pytest.raises(ConfigError, match=r"replaced by another one|dropped and made again"):
        worlds[1].source().check_resume(position)


def test_another_number_of_rows_is_another_source():
    def rows(count: int | None) -> Source:
        return GeneratorSource(lambda i: {"n": np.asarray(i)}, count=count)

    for count in (10, None):
        rows(count).check_resume(position_of(rows(count)))
        rows(count).check_resume(b"all")  # of a version that did not note it
    for then, now in ((10, 20), (10, None), (None, 10)):
        with pytest.raises(ConfigError, match=r"source of .* rows, and now it has"):
            rows(now).check_resume(position_of(rows(then)))
    with pytest.raises(ConfigError, match=r"source of 2 rows, and now it has 1"):
        from_rows([{"n": 1}]).check_resume(position_of(from_rows([{"n": 1}, {"n": 2}])))
    with pytest.raises(ConfigError, match="written by another kind of source"):
        rows(10).check_resume(b"files read once")


def test_a_hybrid_source_asks_the_one_that_was_being_read(tmp_path):
    first, second = from_rows([{"n": 1}]), files(tmp_path)
    source = HybridSource(first, second)
    in_second = source.discover(position_of(source), CONTEXT).position
    source.check_resume(in_second)
    with pytest.raises(ConfigError, match="job that read the files once"):
        HybridSource(first, files(tmp_path, watch=True)).check_resume(in_second)


def job(tmp_path, source: Source) -> Environment:
    env = Environment("job", checkpoint_dir=tmp_path / "state", checkpoint_interval=None)
    env.source(source).uid("files").write_jsonl(str(tmp_path / "out")).uid("out")
    return env


def test_a_job_that_had_finished_is_not_silent_about_files_that_it_will_not_read(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one, two = files(tmp_path / "one"), files(tmp_path / "two")
    assert job(tmp_path, one).execute(slots=ProcessSlots()).state == "finished"
    assert job(tmp_path, one).execute(slots=ProcessSlots(), restore_from="latest").had_finished
    for other in (two, files(tmp_path / "one", watch=True)):
        with pytest.raises(
            ConfigError, match=r"source 'file': checkpoint 1: FileSource: the checkpoint is of a job that"
        ):
            job(tmp_path, other).execute(slots=ProcessSlots(), restore_from="latest")


def test_a_table_is_not_watched_after_its_end(tmp_path):
    world = WORLDS["delta"](tmp_path)
    world.create()
    assert job(tmp_path, world.source()).execute(slots=ProcessSlots()).state == "finished"
    with pytest.raises(ConfigError, match=r"had been read to its end.*watch=True.*--fresh"):
        job(tmp_path, world.source(watch=True)).execute(slots=ProcessSlots(), restore_from="latest")
