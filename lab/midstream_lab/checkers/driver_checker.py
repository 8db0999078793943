"""What is checked of each driver of a run: that failures have causes, and that what it owes comes in time."""

from __future__ import annotations

from collections.abc import Callable

from midstream.engine.coordinator.placement import autoscaler
from midstream.engine.protocol import messages as m
from midstream.simulation.cluster import DriverObserver, SimulatedDriver
from midstream_lab.checkers.failure_causes import FailureCauses
from midstream_lab.checkers.liveness_checker import CANCEL_ENDS, LivenessChecker


class DriverChecker(DriverObserver):
    """The checks of one driver. `patience_s`, `bound_s` and `denied`: see `FailureCauses` and `LivenessChecker`."""

    def __init__(
        self, driver: SimulatedDriver, patience_s: float, bound_s: float, denied: Callable[[str], bool]
    ) -> None:
        cluster = driver.cluster
        self._driver = driver
        self.rescales = 0
        """How often the running job has continued at another parallelism."""
        self.scalings = 0
        """How often the job has changed its parallelism by itself."""
        self.had_slots = False
        """Whether there were slots when the driver decided to run its last commit itself. Later ones come too late."""
        self.triggers: list[int] = []
        """The checkpoints of the job in the order of their triggers, once for every slot that was triggered."""
        self.claimed: dict[int, int] = {}
        """The length of `triggers` when the directory of a client's savepoint was claimed, by client."""
        self._causes = FailureCauses(cluster.struck_us, patience_s, denied, driver.unexplained)
        self._liveness = LivenessChecker(bound_s, cluster.struck_us, lambda: cluster.world.now_us, driver.unexplained)

    def check(self) -> None:
        """Check that nothing is owed for too long."""
        self._liveness.check()

    def _check_scaling(self) -> None:
        """Check that a job which scales itself is within its bounds, and reports the parallelism that it runs at."""
        coordinator = self._driver.coordinator
        bounds, now = coordinator.plan.config.autoscale, coordinator.plan.config.parallelism
        if bounds is None:
            return
        if not bounds.min <= now <= bounds.max:
            self._driver.bug(f"the job runs at parallelism {now}, which is not between {bounds.min} and {bounds.max}")
        changes = coordinator.autoscaler.changes
        if bounds.is_advice and changes:
            self._driver.bug(f"a job that only gives advice has changed its parallelism: {changes}")
        by_load = [
            change for change in changes if not change.reason.startswith("the job needs ")
        ]  # as for want of slots
        if len(by_load) > autoscaler.CHANGES_MAX:
            self._driver.bug(f"{len(by_load)} changes of the parallelism, of at most {autoscaler.CHANGES_MAX}")
        if len(changes) > self.scalings:
            self.scalings = len(changes)
            if changes[0].after != now:
                self._driver.bug(f"a change to parallelism {changes[0].after} is reported, and the job runs at {now}")

    def on_request(self, client: int, request: m.ClientRequest) -> None:
        self._liveness.on_request(client, request)

    def on_answer(self, client: int, request: m.ClientRequest, reply: m.Reply) -> None:
        self._liveness.comes(client)
        if isinstance(request, m.DoRescale) and not reply.error:
            self.rescales += reply.checkpoint is not None

    def deployed(self, deploy: m.Deploy) -> None:
        self._causes.deployed(deploy)
        self._liveness.deployed()

    def triggered(self, checkpoint_id: int) -> None:
        self.triggers.append(checkpoint_id)
        self._causes.triggered(checkpoint_id, self._driver.cluster.world.now_us)

    def location_claimed(self, client: int) -> None:
        self.claimed[client] = len(self.triggers)

    def commits_here(self) -> None:
        self.had_slots = bool(self._driver.connections) and self._driver.coordinator.outcome is None

    def checkpoint_failed(self, checkpoint_id: int, reason: str) -> None:
        self._liveness.failed(self._driver.coordinator.checkpoints.schedule.failures)
        self._causes.checkpoint_failed(checkpoint_id, reason, self._driver.plan.config.checkpoint_timeout_s)

    def on_message(self, message: m.FromSlot, pending_id: int | None) -> None:
        self._causes.on_message(message, pending_id)

    def handled(self, message: m.FromSlot) -> None:
        self._check_scaling()
        self._liveness.on_message(message, self._driver.coordinator.attempt)

    def cancelled(self) -> None:
        self._liveness.owes(CANCEL_ENDS)

    def ended(self) -> None:
        self._liveness.ended()


def checker_of(driver: SimulatedDriver) -> DriverChecker:
    assert isinstance(driver.observer, DriverChecker)
    return driver.observer
