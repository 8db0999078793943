"""The clock of the simulated world: I/O that lets other processes on does not let time run further than it may."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from midstream.simulation.world import Process, Tempo, World

SOON_S = 0.000_05
LATE_S = 0.2


def let_on(world: World) -> None:
    world.io_point()


def hang(world: World) -> None:
    world.hang(1_000)


@pytest.mark.parametrize("goes_on", [let_on, hang])
@pytest.mark.parametrize("is_dead", [False, True], ids=["a cancelled timer", "a timer of a dead process"])
def test_what_is_due_after_the_io_does_not_run_within_it(goes_on: Callable[[World], None], is_dead: bool) -> None:
    # A step that does nothing, and is due during the I/O, has no later one run in its place.
    for seed in range(20):
        assert order_of(seed, goes_on, is_dead=is_dead) == ["soon", "io", "late"]


def order_of(seed: int, goes_on: Callable[[World], None], *, is_dead: bool) -> list[str]:
    world = World(seed, Tempo(mail_us=40, io_us=1_000, interleave=1.0))
    process, other = Process(world, "process"), Process(world, "other")
    ran: list[str] = []

    def work() -> None:
        timer = other.call_later(SOON_S, lambda: None)
        if is_dead:
            other.crash()
        else:
            timer.cancel()
        process.call_later(SOON_S, lambda: ran.append("soon"))
        process.call_later(LATE_S, lambda: ran.append("late"))
        goes_on(world)
        ran.append("io")

    process.submit(work, lambda outcome: None)
    while world.step():
        pass
    return ran


def test_what_takes_its_time_holds_up_what_began_before_it() -> None:
    world = World(0, Tempo(mail_us=40, io_us=1_000, interleave=1.0))
    first, second = Process(world, "first"), Process(world, "second")
    seen: list[tuple[str, bool]] = []

    def taking_time(name: str, process: Process) -> None:
        process.call_later(SOON_S, lambda: seen.append((name, world.is_held_up)))
        world.hang(1_000)

    def others_first() -> None:
        second.submit(lambda: taking_time("above another", second), lambda outcome: None)
        for _ in range(100):
            world.io_point()

    first.submit(lambda: taking_time("alone", first), lambda outcome: None)
    while world.step():
        pass
    first.submit(others_first, lambda outcome: None)
    while world.step():
        pass
    assert seen == [("alone", False), ("above another", True)]
    assert not world.is_held_up
