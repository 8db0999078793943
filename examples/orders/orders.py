"""A shop: orders with their payment and shipment, unpaid orders, and what each day and each customer brings.

midstream run examples/orders/orders.py --preview 5
midstream run examples/orders/orders.py --slots process
midstream simulate examples/orders/orders.py --seeds 0:20

Shows drop_duplicates, a chain of outer joins, an anti join, days of a time zone, and running totals. `shop.py` makes the
input.
"""

from datetime import datetime
from pathlib import Path

from midstream import Count, DataStream, Environment, Sum, WatermarkStrategy, tumbling

INPUT = Path(__file__).parent / "in"
env = Environment("orders", parallelism=2, checkpoint_dir="state/orders", checkpoint_interval="1 s")


def read(name: str, time: str, schema: dict[str, type]) -> DataStream:
    """Return the rows of one directory, each once; they are up to five minutes out of order."""
    rows = env.read_files(INPUT / name, schema={"order": int, **schema, time: datetime}).uid(name)
    rows = rows.with_watermarks(time, WatermarkStrategy.bounded("5 min"))
    return rows.drop_duplicates("order", within="1 h").uid(f"{name}-once")


orders = read("orders", "ordered", {"customer": str, "cents": int})
payments = read("payments", "paid", {"paid_cents": int})
shipments = read("shipments", "shipped", {})

# a payment more than a day after its order, or without one, is a row of its own
paid = orders.join(payments, on="order", how="full", within=(0, "24 h")).uid("with-payment")
whole = paid.join(shipments, on="order", how="full", within=(0, "24 h")).uid("with-shipment")
unpaid = orders.join(payments, on="order", how="anti", within=(0, "30 min")).uid("find-unpaid")
days = payments.window_all(tumbling("1 d", zone="Europe/Paris")).aggregate(payments=Count(), cents=Sum("paid_cents"))
totals = orders.key_by("customer").aggregate(orders=Count(), cents=Sum("cents"), every="1 min").uid("per-customer")

whole.write_parquet("out/orders/whole").uid("whole")
unpaid.write_jsonl("out/orders/unpaid").uid("unpaid")
days.uid("per-day").write_jsonl("out/orders/days").uid("days")
totals.write_jsonl("out/orders/totals").uid("totals")  # or write_postgres(dsn, "totals", key=["customer"])

if __name__ == "__main__":
    env.execute(resume=True)
