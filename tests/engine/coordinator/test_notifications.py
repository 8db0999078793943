"""Notifications and tables of the coordinator: all of them are there, and what is not in a table raises with its history."""

from __future__ import annotations

import inspect
from collections.abc import Hashable
from enum import Enum
from typing import Any

import pytest
from coordinator_world import Bench

from midstream.engine.coordinator import events as ev
from midstream.engine.coordinator import notifications
from midstream.engine.coordinator.checkpoints.pending_checkpoint import CHECKPOINT_TABLE, CheckpointProgress
from midstream.engine.coordinator.job_phase import PHASE_TABLE, Phase
from midstream.engine.coordinator.placement.attempt import TASK_PHASE_TABLE, TaskPhase
from midstream.engine.coordinator.placement.rescale import RESCALE_TABLE, RescaleStage
from midstream.engine.coordinator.requests.savepoints import SAVEPOINT_TABLE, SavepointStage
from midstream.engine.core.errors import InvariantError
from midstream.engine.core.state_machine import TransitionTable


def test_every_notification_has_subscribers_and_every_position_in_their_order_a_reason() -> None:
    found = vars(Bench().job._effects.notifications)
    assert found.keys() == inspect.get_annotations(notifications.Notifications).keys()
    for name, notification in found.items():
        assert notification.subscribers and all(why for _, why in notification.subscribers), name


def test_subscribers_are_notified_in_order() -> None:
    notified: list[str] = []
    warned: notifications.Notification[[str]] = notifications.Notification(
        (lambda text: notified.append(f"first: {text}"), "it comes first"),
        (lambda text: notified.append(f"second: {text}"), "it comes second"),
    )
    warned("a slot has gone")
    assert notified == ["first: a slot has gone", "second: a slot has gone"]


@pytest.mark.parametrize(
    ("table", "states", "first"),
    [
        (PHASE_TABLE, Phase, Phase.CREATED),
        (TASK_PHASE_TABLE, TaskPhase, TaskPhase.DEPLOYING),
        (CHECKPOINT_TABLE, CheckpointProgress, CheckpointProgress.NONE),
        (SAVEPOINT_TABLE, SavepointStage, SavepointStage.CLAIMING),
        (RESCALE_TABLE, RescaleStage, RescaleStage.NONE),
    ],
    ids=lambda value: value.machine if isinstance(value, TransitionTable) else "",
)
def test_every_state_of_a_table_can_be_reached(
    table: TransitionTable[Any, Hashable], states: type[Enum], first: Enum
) -> None:
    reached, new = {first}, {first}
    while new:
        new = {then for row in table.rows if row.state in new for then in row.then} - reached
        reached |= new
    assert reached == set(states)


def test_what_cannot_come_names_machine_phase_and_event_and_says_what_came_before() -> None:
    bench = Bench().run()
    with pytest.raises(
        InvariantError, match=r"coordinator: STARTED while RUNNING; the last events: 1 CREATED: Started"
    ):
        bench.shell.feed(ev.Started())
