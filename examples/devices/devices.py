"""Thermometers: statistics of each one's last ten minutes, and alerts when one is too hot or silent.

midstream run examples/devices/devices.py --preview 5
midstream run examples/devices/devices.py --slots process
midstream simulate examples/devices/devices.py --seeds 0:20

Shows sliding windows, a table that is loaded again each day, a function with state and timers, an anti join, and calls
that take time. `readings.py` makes the input.
"""

import asyncio
from datetime import datetime, timedelta
from pathlib import Path

from midstream import (
    Environment,
    KeyedProcessFunction,
    ListState,
    Mean,
    StdDev,
    ValueState,
    WatermarkStrategy,
    sliding,
)

INPUT = Path(__file__).parent / "in"
ALERT = {"device": str, "site": str, "kind": str, "at": datetime}
HOT_ROWS, HOT_WITHIN = 3, timedelta(minutes=5)
SILENCE = timedelta(minutes=10)


class Alerts(KeyedProcessFunction):
    """Emits a row for three readings above the limit within five minutes, and for ten minutes without a reading.

    It gets the readings of a device in their order. A device that is silent has no state.
    """

    hot = ListState(datetime)
    last = ValueState(datetime)
    site = ValueState(str)

    def process(self, row, ctx):
        at = row["at"]
        if self.last.value is not None:
            ctx.timers.delete_event_time(self.last.value + SILENCE)
            if at >= self.last.value + SILENCE:  # this row was in one batch with the one before: no timer has fired
                yield self.silent(ctx)
        self.last.value, self.site.value = at, row["site"]
        ctx.timers.event_time(at + SILENCE)
        if row["limit"] is not None and row["celsius"] > row["limit"]:
            self.hot.set([*(each for each in self.hot if each > at - HOT_WITHIN), at])
            if len(self.hot) == HOT_ROWS:
                self.hot.clear()
                yield {"device": ctx.key, "site": row["site"], "kind": "hot", "at": at}

    def on_timer(self, time, ctx):
        return self.silent(ctx)

    def silent(self, ctx):
        alert = {"device": ctx.key, "site": self.site.value, "kind": "silent", "at": self.last.value + SILENCE}
        self.hot.clear()
        self.last.clear()
        self.site.clear()
        return alert


async def with_phone(alert):
    """Return the alert with the phone number of its site: a lookup in a service, here a stand-in."""
    await asyncio.sleep(0.001)
    return {**alert, "phone": f"+33 {sum(map(ord, alert['site'] or '?')):06}"}


env = Environment("devices", parallelism=2, checkpoint_dir="state/devices", checkpoint_interval="1 s")
strategy = WatermarkStrategy.bounded("30 s")
readings = env.read_files(INPUT / "readings", schema={"device": str, "celsius": float, "at": datetime}).uid("readings")
readings = readings.with_watermarks("at", strategy)
answers = env.read_files(INPUT / "answers", schema={"device": str, "at": datetime}).uid("answers")
answers = answers.with_watermarks("at", strategy)

statistics = (
    readings.key_by("device")
    .window(sliding("10 min", "1 min"))
    .aggregate(mean=Mean("celsius"), deviation=StdDev("celsius"))
    .uid("last-ten-minutes")
)
alerts = (
    readings.join_table(INPUT / "devices.csv", on="device", how="left", refresh="1 d")
    .uid("with-site")
    .key_by("device")
    .sort_by_time()
    .uid("in-order")
    .key_by("device")
    .process(Alerts(), ALERT)
    .uid("find-alerts")
    .join(answers, on="device", how="anti", within=("-30 min", 0))  # somebody has answered one half an hour ago
    .uid("without-answer")
    .map_async(with_phone, {**ALERT, "phone": str}, capacity=1000, timeout="5 s")
    .uid("with-phone")
)
statistics.write_parquet("out/devices/statistics").uid("statistics")
alerts.write_jsonl("out/devices/alerts").uid("alerts")

if __name__ == "__main__":
    env.execute(resume=True)
