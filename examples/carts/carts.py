"""A shop: sales per ten minutes, and carts that have not changed for half an hour.

midstream run examples/carts/carts.py --preview 10
"""

from datetime import datetime, timedelta
from pathlib import Path

import polars as pl

from midstream import (
    LATE,
    DataStream,
    Environment,
    KeyedProcessFunction,
    MapState,
    Sum,
    ValueState,
    WatermarkStrategy,
    tumbling,
)

EVENT = {"user": str, "item": str, "action": str, "price": int, "at": datetime}
ABANDONED = {"user": str, "items": int, "worth": int, "since": datetime}
PATIENCE = timedelta(minutes=30)


class AbandonedCarts(KeyedProcessFunction):
    """Emits a row for each cart that is not empty and has not changed for PATIENCE."""

    cart = MapState(key=str, value=int)
    last = ValueState(datetime)

    def process(self, row, ctx):
        if row["action"] == "add":
            self.cart[row["item"]] = row["price"]
        elif row["action"] == "remove":
            self.cart.pop(row["item"], None)
        else:  # it was bought, all of it
            self.cart.clear()
        if self.last.value is None or row["at"] > self.last.value:
            self.last.value = row["at"]
            ctx.timers.event_time(row["at"] + PATIENCE)

    def on_timer(self, time, ctx):
        if time < self.last.value + PATIENCE:
            return None  # the cart has changed since the timer was set
        since, worth, items = self.last.value, sum(self.cart.values()), len(self.cart)
        self.last.clear()
        self.cart.clear()
        return {"user": ctx.key, "items": items, "worth": worth, "since": since} if items else None


def with_event_time(events: DataStream) -> DataStream:
    return events.with_watermarks("at", WatermarkStrategy.bounded("1 min"))


def abandoned(events: DataStream) -> DataStream:
    return events.key_by("user").process(AbandonedCarts(), ABANDONED)


def sold(events: DataStream) -> DataStream:
    """Return the sums paid per ten minutes; purchases that arrive too late are in the side output LATE."""
    return events.filter(pl.col("action") == "buy").window_all(tumbling("10 min")).aggregate(sold=Sum("price"))


HERE = Path(__file__).parent
env = Environment("carts", checkpoint_dir=HERE / "checkpoints")
events = with_event_time(env.read_files(HERE / "events", schema=EVENT).uid("events"))
abandoned(events).write_jsonl(HERE / "abandoned").uid("abandoned")
sales = sold(events)
sales.write_jsonl(HERE / "sold").uid("sold")
sales.side_output(LATE).write_jsonl(HERE / "late").uid("late")

if __name__ == "__main__":
    env.execute()
