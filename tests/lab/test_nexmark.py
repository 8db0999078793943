"""The auction house: event by event as its definition says, and what midstream and polars make of all of them."""

from __future__ import annotations

import tempfile
from datetime import datetime, timedelta
from functools import cache
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from midstream import Environment, WatermarkStrategy, testing
from midstream.connectors.memory.generator_source import GeneratorSource
from midstream.engine.core.errors import ConfigError
from midstream.runtime.process.process_slots import ProcessSlots
from midstream_lab.bench.nexmark import files
from midstream_lab.bench.nexmark.expected import EXPECTED
from midstream_lab.bench.nexmark.generator import AUCTION, BID, SCHEMA, Events
from midstream_lab.bench.nexmark.queries import QUERIES
from midstream_lab.bench.nexmark.running import run

MASK = 2**64 - 1
FIRST = "Peter Paul Luke John Saul Vicky Kate Julie Sarah Deiter Walter"
LAST = "Shultz Abrams Spencer White Bartels Walton Smith Jones Noris"
CITY = "Phoenix,Los Angeles,San Francisco,Boise,Portland,Bend,Redmond,Seattle,Kent,Cheyenne"


HOT_CHANNELS = ("Google", "Facebook", "Baidu", "Apple")


def draw(n: int, salt: int, below: int) -> int:
    z = (n * 16 + salt + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    return (z >> 33) % below


def letters(salt: int, first: int, count: int) -> str:
    return "".join("abcdefghijklmnopqrstuvwxyz"[draw(i, salt, 26)] for i in range(first, first + count))


@cache
def url(channel: int) -> str:
    path = "/".join(letters(14, channel * 15 + k * 5, 5) for k in range(3))
    number = channel - 4
    return f"https://www.nexmark.com/{path}/item.htm?query=1" + (
        f"&channel_id={number}" if number % 10 > 0 <= number else ""
    )


@cache
def extra(i: int) -> str:
    return letters(15, sum(54 + before % 28 for before in range(i)), 54 + i % 28)


def at(ms: int) -> datetime:
    return datetime(1970, 1, 1) + timedelta(milliseconds=ms)


def defined(n: int) -> dict[str, object]:
    """Event n, one Python number after the other."""
    epoch, off = divmod(n, 50)
    newest = epoch * 3 + min(off, 3) - 1
    row: dict[str, object] = dict.fromkeys(SCHEMA.names)
    row["time"] = at(n // 10)
    if off == 0:
        card = draw(n, 4, 10**8) * 10**8 + draw(n, 5, 10**8)
        return row | {
            "kind": 0,
            "person": 1000 + epoch,
            "name": f"{FIRST.split()[draw(n, 0, 11)]} {LAST.split()[draw(n, 1, 9)]}",
            "city": CITY.split(",")[draw(n, 2, 10)],
            "state": ("AZ", "CA", "ID", "OR", "WA", "WY")[draw(n, 3, 6)],
            "email": f"user{epoch}@example.com",
            "credit_card": f"{card:016d}",
        }
    if off <= 3:
        hot = epoch // 100 * 100
        first = 100 + draw(n, 3, 10**6)
        return row | {
            "kind": 1,
            "auction": 1000 + newest,
            "item": f"item-{newest}",
            "seller": 1000 + (hot if draw(n, 0, 4) > 0 else epoch - draw(n, 1, min(epoch, 999) + 1)),
            "category": 10 + draw(n, 2, 5),
            "initial_bid": first,
            "reserve": first + draw(n, 5, 10**6),
            "expires": at(n // 10 + 1 + draw(n, 4, 334)),
        }
    channel = draw(n, 6, 4) if draw(n, 5, 2) > 0 else 4 + draw(n, 7, 10_000)
    hot_auction, hot_person = newest // 100 * 100, min(epoch // 100 * 100 + 1, epoch)
    return row | {
        "kind": 2,
        "bid_auction": 1000 + (hot_auction if draw(n, 0, 2) > 0 else newest - draw(n, 1, min(newest, 99) + 1)),
        "bidder": 1000 + (hot_person if draw(n, 2, 4) > 0 else epoch - draw(n, 3, min(epoch, 999) + 1)),
        "price": 100 * int(10 ** (draw(n, 4, 4096) / 4096 * 6) + 1e-9),
        "channel": HOT_CHANNELS[channel] if channel < 4 else f"channel-{channel - 4}",
        "url": url(channel),
        "extra": extra(draw(n, 8, 4096)),
    }


@pytest.mark.parametrize("first", [0, 9_980_000])
def test_events_are_what_their_definition_says(first):
    events = Events(10_000_000, lanes=1)
    assert events(np.arange(first, first + 10_000)).to_pylist() == [defined(n) for n in range(first, first + 10_000)]


def test_parts_have_whole_epochs_in_turns_and_every_event_once():
    events = Events(1500, lanes=3)
    epochs = events.starts(np.arange(30)).reshape(3, 10) // 50
    assert (epochs == np.arange(3)[:, None] + 3 * np.arange(10)).all()
    whole = Events(1500, lanes=1)(np.arange(1500))
    for part in range(3):
        rows = [50 * epoch + place for epoch in epochs[part] for place in range(50)]
        assert events(np.arange(500 * part, 500 * part + 500)).equals(whole.take(rows))


@pytest.mark.parametrize(
    ("first", "behind"), [(0, 1), (3, 5), (49, 51), (7, 100), (50, 150), (999, 1003), (17, 29_983)]
)
def test_events_of_some_indices_are_those_of_all_there(first, behind):
    events = Events(30_000, lanes=2)
    assert events(np.arange(first, behind)).equals(events(np.arange(30_000)).slice(first, behind - first))


@pytest.mark.parametrize("indices", [[3, 5], [3, 5, 4, 6]])
def test_indices_that_do_not_follow_each_other_are_refused(indices):
    with pytest.raises(ConfigError, match=f"{len(indices)} indices from 3 to {indices[-1]} do not follow each other"):
        Events(100, lanes=1)(np.array(indices))


def test_events_that_cannot_be_dealt_out_in_epochs_are_refused():
    with pytest.raises(ConfigError, match="1,050 events are not a multiple of 100"):
        Events(1050, lanes=2)


def test_files_have_every_event_once_in_the_order_of_their_names_and_are_written_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files, "EVENTS_PER_FILE", 600)
    directory = files.written(1500)
    paths = sorted(directory.iterdir())
    assert [pq.read_metadata(path).num_rows for path in paths] == [600, 600, 300]
    assert sorted(paths, key=lambda path: path.stat().st_mtime) == paths
    found = pa.concat_tables(map(pq.read_table, paths)).combine_chunks().to_batches()
    assert found == [Events(1500, lanes=1)(np.arange(1500))]
    before = [path.stat().st_ino for path in paths]
    assert [path.stat().st_ino for path in sorted(files.written(1500).iterdir())] == before
    assert list(tmp_path.iterdir()) == [directory]


def test_files_that_were_not_written_to_the_end_are_not_there(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(files.os, "utime", Mock(side_effect=OSError("no space is left")))
    with pytest.raises(OSError, match="no space is left"):
        files.written(1500)
    assert list(tmp_path.iterdir()) == []


def test_events_come_from_a_place_that_there_is():
    with pytest.raises(ConfigError, match="--source: 'kafka' is not one of generator, parquet"):
        run("process", query="q0", source="kafka")


def test_only_the_columns_that_a_query_reads_are_made():
    events = Events(1500, lanes=3, columns=("price", "person"))
    assert events.schema.names == ["kind", "time", "person", "price"]
    i = np.arange(1500)
    assert events(i).equals(Events(1500, lanes=3)(i).select(events.schema.names))


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_reads_no_more_than_it_says(name):
    events = Events(5000, lanes=1, columns=QUERIES[name].reads)
    stream = Environment("nexmark").source(GeneratorSource(events, events.count, schema=events.schema))
    QUERIES[name].build(stream.with_watermarks("time", WatermarkStrategy.monotonous()))


@pytest.mark.systems
@pytest.mark.turns(2)
def test_all_queries_come_to_what_polars_makes_of_the_same_events():
    count = 120_000
    env = Environment("nexmark", parallelism=2)
    source = GeneratorSource(Events(count, lanes=2), count, schema=SCHEMA)
    events = env.source(source).with_watermarks("time", WatermarkStrategy.monotonous())
    sinks = {name: query.sink() for name, query in QUERIES.items()}
    for name, query in QUERIES.items():
        query.build(events).sink(sinks[name])
    assert env.execute(slots=ProcessSlots()).state == "finished"
    for name, sink in sinks.items():
        assert sink.total[0] > 0, name
        expected = [
            total if wanted is None else wanted for total, wanted in zip(sink.total, EXPECTED[name](count), strict=True)
        ]
        assert sink.total.tolist() == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("extras", [("bb", "a"), ("a", "bb")])
def test_which_of_equal_bids_wins_does_not_depend_on_their_order(extras):
    stream = Environment("ties").from_collection([], schema=SCHEMA)
    winners = QUERIES["q9"].build(stream.with_watermarks("time", WatermarkStrategy.monotonous())).uid("winners")
    auction = {"kind": AUCTION, "time": at(1), "auction": 7, "expires": at(9)}
    bids = [
        {"kind": BID, "time": at(2), "bid_auction": 7, "bidder": 3, "price": 100, "extra": extra} for extra in extras
    ]
    (winner,) = testing.run(winners, [auction, *bids])["winners"]
    assert (winner["price"], winner["extra"]) == (100, "a")
