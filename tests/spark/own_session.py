"""Run as a program: a job of two slots on a Spark session of its own, one of which is killed and replaced."""

from __future__ import annotations

import os
import signal
import sys

from midstream.runtime.driver import Driver
from midstream.runtime.job import Job
from midstream.spark.session import get_session
from midstream.spark.slots import SparkSlots
from scripted import Scripted, alive, plan, until


def main(master: str) -> None:
    made: list[Scripted] = []

    def make(plan: object, now_ms: int) -> Scripted:
        made.append(Scripted(plan, now_ms))  # type: ignore[arg-type]
        return made[0]

    driver = Driver(plan(2), SparkSlots(get_session(master)), make)
    driver.start()
    coordinator = made[0]
    until("two slots", lambda: len(coordinator.slots) == 2, 60)
    sibling, killed = coordinator.slots[0], coordinator.slots[1]
    os.kill(killed, signal.SIGKILL)
    until("a third", lambda: 2 in coordinator.slots, 30)
    assert alive(sibling) and coordinator.slots[0] == sibling and len(coordinator.lost) == 1
    print("ready", *coordinator.slots.values(), flush=True)
    Job(driver).wait(60)


if __name__ == "__main__":
    main(sys.argv[1])
