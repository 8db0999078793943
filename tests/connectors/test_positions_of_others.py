"""What a checkpoint holds of a source whose uid another kind of source has now: refused, for trying again cannot help."""

from __future__ import annotations

import msgspec
import numpy as np
import polars as pl
import pytest
from table_worlds import WORLDS

from midstream.connectors.files.file_source import FileSource
from midstream.connectors.memory.collection_source import from_rows
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.operators.sink_api import decoded
from midstream.engine.operators.source_api import DiscoveryContext, Source, Split, decoded_splits

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
