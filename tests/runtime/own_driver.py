"""Run as a program: a job of two slots in processes; says their pids, then waits or (`leave`) just ends."""

from __future__ import annotations

import sys

import polars as pl  # its signal handler has a long wait go on, and Python does not see a Ctrl-C before its end

from midstream.runtime.driver.driver import Driver
from midstream.runtime.driver.job import Job
from midstream.runtime.process.process_slots import ProcessSlots
from scripted_coordinator import Scripted, plan
from waiting import until


def main(then: str) -> None:
    assert pl.thread_pool_size() > 0
    made: list[Scripted] = []

    def make(plan: object, now_ms: int) -> Scripted:
        made.append(Scripted(plan, now_ms))  # type: ignore[arg-type]
        return made[0]

    driver = Driver(plan(2, heartbeat_timeout_s=1.5), ProcessSlots(), make)
    driver.start()
    until("two slots", lambda: len(made[0].slots) == 2, 60)
    print("ready", *made[0].slots.values(), flush=True)
    if then == "wait":
        Job(driver).wait()


if __name__ == "__main__":
    main(sys.argv[1])
