"""The last events of a coordinator, which the error for an event that cannot occur shows."""

from __future__ import annotations

from collections import deque
from typing import Final

from midstream.engine.coordinator import events as ev
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.core.interfaces import Failed
from midstream.engine.protocol.messages import InCall, SlotStatus

EVENTS_MAX: Final = 30


class RecentEvents:
    """The last events, without heartbeats and the passing of time."""

    def __init__(self) -> None:
        self._events: deque[tuple[int, Phase, ev.CoordinatorEvent]] = deque(maxlen=EVENTS_MAX)

    def record(self, number: int, phase: Phase, event: ev.CoordinatorEvent) -> None:
        is_heartbeat = isinstance(event, ev.SlotMessage) and isinstance(event.message, (SlotStatus, InCall))
        if not (is_heartbeat or isinstance(event, ev.TimePassed)):
            self._events.append((number, phase, event))

    def __str__(self) -> str:
        return "; ".join(f"{number} {phase.name}: {_brief(event)}" for number, phase, event in self._events)


def _brief(event: ev.CoordinatorEvent) -> str:
    """Describe an event shortly, and cheaply whatever it carries."""
    match event:
        case ev.SlotMessage(slot, message):
            parts = [getattr(message, name) for name in ("attempt", "checkpoint_id", "task") if hasattr(message, name)]
            return f"slot {slot} sent {type(message).__name__}({', '.join(map(str, parts))})"
        case ev.IoDone(token, outcome):
            return f"{token} failed: {outcome.error!r:.200}" if isinstance(outcome, Failed) else f"{token} done"
        case _:  # the others are short
            return repr(event)
