"""Readings of thermometers as they arrive, and who has answered an alert.

python examples/devices/readings.py 45   # writes examples/devices/in
"""

import random
import sys
from datetime import datetime, timedelta
from pathlib import Path

import polars as pl

START = datetime(2024, 7, 1, 12)
DEVICES = pl.DataFrame({"device": ["d0", "d1", "d2"], "site": ["roof", "cellar", "roof"], "limit": [35.0, 20.0, 35.0]})


def readings(minutes: int, seed: int = 7) -> dict[str, pl.DataFrame]:
    """Return the rows of each source in the order in which they arrive: up to half a minute late.

    Each device reports once a minute, sometimes at the same second as before. One is silent for a while, one is not in
    the table, and each is hot for some time.
    """
    chance = random.Random(seed)
    rows = []
    for number, device in enumerate(["d0", "d1", "d2", "d9"]):
        for minute in range(minutes):
            is_hot = (minute // 10 + number) % 3 == 0
            celsius = round(chance.gauss(45 if is_hot else 15, 5), 1)
            at = START + timedelta(minutes=minute, seconds=chance.choice([0, chance.randrange(60)]))
            if device != "d0" or not minutes // 3 <= minute < minutes * 2 // 3:
                rows.append({"device": device, "celsius": celsius, "at": at})
    rows.sort(key=lambda row: row["at"] + timedelta(seconds=chance.randrange(30)))
    answers = [{"device": "d1", "at": START + timedelta(minutes=minutes * 8 // 15)}]
    return {"readings": pl.DataFrame(rows), "answers": pl.DataFrame(answers)}


if __name__ == "__main__":
    directory = Path(__file__).parent / "in"
    for name, frame in readings(int(sys.argv[1])).items():
        (directory / name).mkdir(parents=True, exist_ok=True)
        frame.write_csv(directory / name / "1.csv", datetime_format="%Y-%m-%dT%H:%M:%S")
    DEVICES.write_csv(directory / "devices.csv")
