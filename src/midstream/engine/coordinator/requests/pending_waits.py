"""What the job waits for: each wait has a name, which the status shows, and a limit.

| wait | limit |
|---|---|
| a checkpoint's acknowledgements, and its metadata's writing | `checkpoint_timeout`, see `checkpoint_coordinator` |
| slots that were requested | `slot_timeout`, see `slot_pool` |
| slots that cancel their tasks | `heartbeat_timeout`, see `attempt_deployer` |
| slots that read state and open operators, tasks that start | `limit_s`; then the attempt fails |
| the checkpoint directory, a sink's committer, a source's enumerator | `limit_s`; then the job fails for good |
| a restart, before a drain can end | none: a temporary failure ends by itself, and clients see the wait |
| all other I/O at the end of the job | `coordinator.END_TIMEOUT_S` |
| savepoints that are copied, files that are deleted, the plan of a rescale | none: the job continues meanwhile |
| brokers and other services that slots report as not answering | none here: the source or sink that calls them has a limit of its own |
| a user's function, while checkpoints are made | that of the checkpoints; then that of cancelling |

A call of a committer or a source cannot be given up and repeated: each has one call at a time, and while it is not
known whether a call still runs, another one must not be made. The committables are in the newest checkpoint, so
starting the job again loses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from midstream.engine.coordinator.effects import Effects
from midstream.engine.coordinator.failures import Failure
from midstream.engine.coordinator.job_phase import Phase
from midstream.engine.core.config import JobConfig
from midstream.engine.core.errors import ClusterError, UnavailableError, assert_never
from midstream.engine.protocol.job_status import WaitStatus

if TYPE_CHECKING:
    from midstream.engine.coordinator.coordinator import Coordinator

_log = logging.getLogger(__name__)

SHOWN_S: Final = 5.0
"""The time from which a wait is shown."""
LOGGED_S: Final = 30.0
LIMIT_S: Final = 600.0


def limit_s(config: JobConfig) -> float:
    """Return the limit of waits that have none of their own: `checkpoint_timeout`, but at least `LIMIT_S`, since that
    timeout may be set to what a checkpoint alone needs.
    """
    return max(LIMIT_S, config.checkpoint_timeout_s)


class PendingWaits:
    """Finds what the job waits for, each time again; it stores only since when, and which waits have been logged."""

    def __init__(self, effects: Effects, name: str) -> None:
        self._effects = effects
        self._name = name
        self._state: tuple[Phase, int] | None = None
        """The phase and the attempt at the last call of `poll`."""
        self._since_s = 0.0
        """When `poll` first found that phase and attempt."""
        self._logged: set[str] = set()
        """The waits that have been logged and continue."""

    def poll(self, coordinator: Coordinator, passed_s: float) -> None:
        """Time has passed: log the waits that take long. If one exceeds its limit, the attempt or the job fails."""
        self._effects.elapsed_s += passed_s
        state = _state(coordinator)
        if state != self._state:
            self._state, self._since_s = state, self._effects.elapsed_s
        if coordinator.phase in (Phase.ENDING, Phase.ENDED):
            return  # the end of a job has its own limit
        self._log([wait for wait in self.shown(coordinator) if wait.for_ms >= LOGGED_S * 1000])
        failure = self._overdue(coordinator)
        if failure is not None:
            self._effects.notifications.attempt_failed(failure)

    def shown(self, coordinator: Coordinator) -> tuple[WaitStatus, ...]:
        """Return the waits that have taken longer than `SHOWN_S`, longest first."""
        found = [wait for wait in self._all(coordinator) if wait.for_ms > SHOWN_S * 1000]
        return tuple(sorted(found, key=lambda wait: -wait.for_ms))

    def _log(self, long: list[WaitStatus]) -> None:
        for wait in long:
            if wait.what not in self._logged:
                _log.warning("job %s: %s", self._name, wait.sentence)
        self._logged = {wait.what for wait in long}

    def _overdue(self, coordinator: Coordinator) -> Failure | None:
        most_s = limit_s(coordinator.plan.config)
        for call in self._effects.calls:
            if call.has_limit and self._effects.elapsed_s - call.began_s > most_s:
                text = (
                    f"waited for {call.waits_for}: the call has not returned within {most_s:g} s, and this program can "
                    "neither abandon nor repeat it. End the program, remove the cause, and start the job again with --from latest"
                )
                return Failure(text, "", UnavailableError(text), fatal=True)
        if coordinator.phase in (Phase.DEPLOYING, Phase.STARTING) and self._in_phase_ms(coordinator) > most_s * 1000:
            what = ", ".join(wait.what for wait in self._of_phase(coordinator))
            text = f"waited for {what}: not done within {most_s:g} s (if that is too short, raise checkpoint_timeout)"
            return Failure(text, "", ClusterError(text))
        return None

    def _in_phase_ms(self, coordinator: Coordinator) -> int:
        """Return how long the job has been in its phase; 0 if the phase has begun since the last call of `poll`."""
        if _state(coordinator) != self._state:
            return 0
        return round((self._effects.elapsed_s - self._since_s) * 1000)

    def _all(self, coordinator: Coordinator) -> Iterator[WaitStatus]:
        if coordinator.phase is not Phase.ENDED:
            yield from self._of_io(coordinator)
            yield from self._of_phase(coordinator)
            yield from self._of_tasks(coordinator)

    def _of_io(self, coordinator: Coordinator) -> Iterator[WaitStatus]:
        config, publishing = coordinator.plan.config, coordinator.checkpoints.publishing_call
        for call in self._effects.calls:
            for_ms = round((self._effects.elapsed_s - call.began_s) * 1000)
            within_s = limit_s(config) if call.has_limit else None
            if call.waits_for == publishing:
                within_s = config.checkpoint_timeout_s
            yield WaitStatus(call.waits_for, for_ms, None if within_s is None else round(within_s * 1000))

    def _of_phase(self, coordinator: Coordinator) -> Iterator[WaitStatus]:
        config, attempt, for_ms = coordinator.plan.config, coordinator.attempt, self._in_phase_ms(coordinator)
        general_ms = round(limit_s(config) * 1000)
        match coordinator.phase:
            case Phase.WAITING_TO_DEPLOY if not coordinator.slots.complete:
                slots = coordinator.slots
                what = f"{slots.needed - slots.staying} of {slots.needed} slots to connect"
                for_ms = round((self._effects.elapsed_s - slots.gathers_since_s) * 1000)
                yield WaitStatus(what, for_ms, round(config.slot_timeout_s * 1000))
            case Phase.DEPLOYING if attempt is not None:
                what = f"{_slots(attempt.unanswered)} to load the state it resumes from, and to open the operators"
                yield WaitStatus(what, for_ms, general_ms)
            case Phase.STARTING:
                yield WaitStatus("the tasks to start", for_ms, general_ms)
            case Phase.CANCELLING if attempt is not None and attempt.unanswered:
                what = f"{_slots(attempt.unanswered)} to cancel the tasks"
                yield WaitStatus(what, for_ms, round(config.heartbeat_timeout_s * 1000))
            case Phase.WAITING_TO_DEPLOY if coordinator.requests.draining and coordinator.restarts.delayed:
                what = "the restart after a failure, since a drain ends once the job processes everything"
                yield WaitStatus(f"{what}; cancel the job to end it without", for_ms)
            case Phase.WAITING_TO_DEPLOY | Phase.DEPLOYING | Phase.CANCELLING:
                pass  # nothing is missing
            case Phase.CREATED | Phase.OPENING | Phase.RUNNING | Phase.ENDING | Phase.ENDED:
                pass  # in these phases the job does not wait because of the phase
            case _:
                assert_never(coordinator.phase)

    def _of_tasks(self, coordinator: Coordinator) -> Iterator[WaitStatus]:
        checkpoints = coordinator.checkpoints
        pending = checkpoints.pending
        if pending is not None and checkpoints.outcome_is_known:
            for_ms = round((self._effects.elapsed_s - checkpoints.schedule.triggered_s) * 1000)
            if for_ms > SHOWN_S * 1000:  # a shorter wait is not shown, and there may be many tasks to name
                what = f"checkpoint {pending.checkpoint_id}, of {checkpoints.unanswered(pending)}"
                yield WaitStatus(what, for_ms, round(coordinator.plan.config.checkpoint_timeout_s * 1000))
        outside: dict[str, int] = {}
        for slot in coordinator.slots.live.values():
            for wait in slot.status.waits if slot.status is not None else ():
                outside[wait.what] = max(wait.for_ms, outside.get(wait.what, 0))
            if slot.in_call is not None:
                at = f" ({slot.in_call.where})" if slot.in_call.where else ""
                yield WaitStatus(f"{slot.in_call.operator}{at}", slot.in_call.for_ms, is_call=True)
        for what, for_ms in outside.items():
            yield WaitStatus(what, for_ms)


def _state(coordinator: Coordinator) -> tuple[Phase, int]:
    return coordinator.phase, coordinator.attempt.number if coordinator.attempt else -1


def _slots(ids: set[int]) -> str:
    numbers = ", ".join(map(str, sorted(ids)))
    return f"slot {numbers}" if len(ids) == 1 else f"slots {numbers}"
