"""Orders, payments and shipments as they arrive: out of order, twice, late after the order or never.

python examples/orders/shop.py 1000   # writes examples/orders/in
"""

import random
import sys
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl

START = datetime(2024, 10, 26, 12)  # the clocks of Paris are set back in the next night
LAST = timedelta(hours=26)


def shop(orders: int, seed: int = 7) -> dict[str, pl.DataFrame]:
    """Return the rows of each source, in the order in which they arrive."""
    chance = random.Random(seed)
    rows: dict[str, list[dict[str, object]]] = {"orders": [], "payments": [], "shipments": []}
    for order in range(orders):
        ordered = START + timedelta(seconds=chance.randrange(2 * 86_400))
        cents = chance.randrange(100, 50_000)
        customer = f"c{chance.randrange(max(2, orders // 10))}"
        rows["orders"].append({"order": order, "customer": customer, "cents": cents, "ordered": ordered})
        if chance.random() < 0.9:  # some after exactly half an hour, some after more than a day
            wait = chance.choice([timedelta(minutes=30), LAST * chance.random(), timedelta(hours=1) * chance.random()])
            rows["payments"].append({"order": order, "paid_cents": cents, "paid": whole_seconds(ordered + wait)})
        if chance.random() < 0.8:
            rows["shipments"].append({"order": order, "shipped": whole_seconds(ordered + LAST * chance.random())})
    return {name: pl.DataFrame(arrived(each, chance)) for name, each in rows.items()}


def whole_seconds(at: datetime) -> datetime:
    return at.replace(microsecond=0)


def arrived(rows: list[dict[str, object]], chance: random.Random) -> list[dict[str, object]]:
    """Return the rows as they arrive: up to five minutes late, and every tenth of them twice."""
    rows = rows + chance.sample(rows, len(rows) // 10)
    *_, time = rows[0]
    return sorted(rows, key=lambda row: row[time] + timedelta(seconds=chance.randrange(300)))


if __name__ == "__main__":
    for name, frame in shop(int(sys.argv[1])).items():
        directory = Path(__file__).parent / "in" / name
        directory.mkdir(parents=True, exist_ok=True)
        times = [column for column, kind in frame.schema.items() if kind == pl.Datetime]
        frame.with_columns(pl.col(times).dt.to_string("iso")).write_ndjson(directory / "1.jsonl")
