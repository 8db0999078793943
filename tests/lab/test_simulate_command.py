"""`python -m midstream_lab simulate`: what it answers, how a failing seed is replayed, and what it refuses."""

from __future__ import annotations

import pytest

from midstream.engine.core.errors import ConfigError
from midstream.simulation.seeds import parse_seeds
from midstream.simulation.trace import Filters
from midstream_lab.campaign import Options, shrink
from midstream_lab.mutations.catalog import MUTATIONS
from midstream_lab.mutations.mutation_command import line_of, measure_mutations
from midstream_lab.mutations.mutation_score import applied
from midstream_lab.run import run
from midstream_lab.simulate import replay, simulate

pytestmark = pytest.mark.turns(2)


def test_good_seeds_are_summed_up() -> None:
    seen = []
    result = simulate(seeds="0:6", topology="keyed", rows=40, jobs=1, progress=lambda s: seen.append(s.runs))
    assert result.ok
    assert result.data["runs"] == 6
    assert result.data["lost"] == result.data["duplicated"] == result.data["deadlocks"] == result.data["failures"] == 0
    assert result.data["records_in"] >= 6 * 39
    assert result.data["first_failing_seed"] is None
    assert seen == [1, 2, 3, 4, 5, 6]


@pytest.mark.systems
def test_two_processes_find_what_one_finds() -> None:
    one = simulate(seeds="0:8", topology="keyed", rows=40, jobs=1).data
    two = simulate(seeds="0:8", topology="keyed", rows=40, jobs=2).data
    assert {k: v for k, v in one.items() if "seconds" not in k and "per_s" not in k} == {
        k: v for k, v in two.items() if "seconds" not in k and "per_s" not in k
    }


def test_a_failing_seed_is_named_made_smaller_and_replayed() -> None:
    with applied(MUTATIONS["block_nothing"]):
        result = simulate(seeds="0:60", topology="union", rows=100, jobs=1)
        assert not result.ok
        seed = result.data["first_failing_seed"]
        assert f"python -m midstream_lab simulate --seed {seed} --trace --topology union --rows 100" in result.text
        small, failure = shrink(Options("union", rows=100).scenario(seed))
        assert failure != "passes"
        assert run(small).failures
        assert len(small.faults) <= len(Options("union", rows=100).scenario(seed).faults)
        again = replay(seed, topology="union", rows=100)
        assert not again.ok
        assert again.data["failures"]
    assert replay(seed, Filters(tail=5), topology="union", rows=100).ok


def test_a_replay_is_filtered_by_a_pattern() -> None:
    result = replay(1, Filters(pattern=r"CheckpointAck|job ended"), topology="keyed", faults="none", rows=30)
    assert result.data["trace"]
    assert all("CheckpointAck" in line or "job ended" in line for line in result.data["trace"])


def test_a_replay_is_filtered_by_channel_and_checkpoint() -> None:
    arguments = {"topology": "keyed", "parallelism": 2, "faults": "none", "rows": 60}
    everything = replay(1, **arguments).data["trace"]  # type: ignore[arg-type]
    channel = replay(1, Filters(channel="0:0:1"), **arguments).data["trace"]  # type: ignore[arg-type]
    assert any("EndOfData" in line for line in channel)
    assert all("e0:0>1" in line for line in channel)
    assert any("e0:0>1 + " in line for line in channel), "what is put into the channel"
    assert any("e0:0>1 - " in line for line in channel), "what is taken out of it"
    checkpoint = replay(1, Filters(channel="0:0:", checkpoint=1), **arguments).data["trace"]  # type: ignore[arg-type]
    assert checkpoint
    assert all("e0:0>" in line and "chk 1" in line for line in checkpoint)
    assert len(everything) > len(channel) > len(checkpoint)
    assert replay(1, Filters(tail=3), **arguments).data["trace"] == everything[-3:]  # type: ignore[arg-type]


def test_a_campaign_ends_when_its_time_is_over() -> None:
    result = simulate(seeds="0:1000000", topology="keyed", rows=20, jobs=1, seconds=0.2)
    assert result.ok
    assert 0 < result.data["runs"] < 10_000


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"topology": "ring"}, "topology: there is no 'ring'"),
        ({"faults": "flood"}, "faults: there is no 'flood'"),
        ({"seeds": "5:5"}, "is empty"),
        ({"seeds": "a:b"}, "is not A:B"),
        ({"parallelism": 0}, "parallelism: 0 is not between"),
        ({"rescale_to": 999}, "rescale-to: 999"),
        ({"rows": 0}, "rows: 0"),
        ({"jobs": 0}, "jobs: 0"),
        ({"seconds": 0.0}, "seconds: 0"),
    ],
)
def test_what_does_not_exist_is_refused(arguments: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("channel", ["0", "1:2", "a:0:1", "1:-1:0"])
def test_a_channel_that_is_none_is_refused(channel: str) -> None:
    with pytest.raises(ConfigError, match="is not edge:producer:consumer"):
        replay(1, Filters(channel=channel), topology="keyed")


def test_unknown_mutations_are_refused() -> None:
    with pytest.raises(ConfigError, match="there is no 'typo'"):
        measure_mutations(names=["typo"])


def test_a_mutation_is_reported_with_the_seeds_it_took_in_its_scenario_and_in_random_ones() -> None:
    lines: list[str] = []
    done = measure_mutations(
        names=["forget_rest"], seeds_max=20, jobs=1, progress=lambda kill: lines.append(line_of(kill))
    )
    (found,) = done.data["mutations"]
    assert done.ok
    assert 1 <= found["own"]["seeds"] <= 20
    assert 1 <= found["random"]["seeds"] <= 20
    assert len(lines) == 1
    assert lines[0] in done.text


def test_a_mutation_that_survives_is_a_hole() -> None:
    done = measure_mutations(names=["swallow_read_error"], seeds_max=1, jobs=1)
    assert not done.ok
    assert done.data["survivors"] == ["swallow_read_error"]
    assert ">1" in done.text


def test_seeds_are_a_range_or_one() -> None:
    assert parse_seeds("3:6") == range(3, 6)
    assert parse_seeds("7") == range(7, 8)
