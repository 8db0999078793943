"""Clicks as they arrive: out of order, twice, incomplete, and not always JSON.

python examples/clickstream/clicks.py 1000   # writes examples/clickstream/in
"""

import json
import random
import sys
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

DAYS = datetime(2024, 5, 1, 23), datetime(2024, 5, 2)
BAD = [
    '{"id": 1, "user":',
    "<html>502 Bad Gateway</html>",
    '{"id": 2, "user": "u1", "page": "/cart"}',
    '{"id": "three"}',
]


def clicks(count: int, seed: int = 7) -> list[dict[str, Any]]:
    """Return clicks of two hours, in the order in which they arrive: up to ten minutes late, and some of them twice."""
    chance = random.Random(seed)
    rows: list[dict[str, Any]] = []
    for number in range(count):
        at = DAYS[number * 2 // count] + timedelta(milliseconds=chance.randrange(3_600_000))
        page = chance.choice(["/", "/", "/tea", "/tea", "/pots", "/cart", f"/news/{chance.randrange(5)}"])
        cents = chance.randrange(100, 9000) if page == "/cart" else None
        row = {"id": number, "user": f"u{chance.randrange(count // 5)}", "page": page, "at": at, "cents": cents}
        rows.append(row | {"campaign": chance.choice(["spring", None])} if at >= DAYS[1] else row)
    rows += chance.sample(rows, count // 10)
    return sorted(rows, key=lambda row: row["at"] + timedelta(minutes=10) * chance.random())


if __name__ == "__main__":
    made = clicks(int(sys.argv[1]))
    directory = Path(__file__).parent / "in"
    directory.mkdir(exist_ok=True)
    for day in DAYS:
        lines = [json.dumps(row, default=str) for row in made if row["at"].date() == day.date()]
        lines[5:5] = BAD
        (directory / f"{day:%Y-%m-%d}.jsonl").write_text("\n".join(lines) + "\n")
