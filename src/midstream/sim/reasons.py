"""Whether what fails in a run has a reason: something that struck, and that can explain this very failure.

Every reason that the simulator gives says `[sim]`, and the engine passes reasons on. So a task that
fails without that word has failed by itself, and so has a checkpoint. What runs out of time says
nothing of its cause: there the faults are looked at that have struck since the checkpoint was
triggered, or so shortly before that they may last, and how long the job may rightly take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from midstream.protocol import messages as m
from midstream.sim.network import SIM
from midstream.sim.scenario import Scenario

LASTS_US: Final = 6_000_000
"""No fault is felt for longer than that after it has struck, but by what says so."""
OUT_OF_TIME: Final = "not complete within "
THERE: Final = " exists already"
UNION: Final = "and only some of its subtasks have finished"
FINISHED: Final = " has finished"
SMALL_POOL: Final = "pool_size: the tasks of one slot need at least"
"""Of a plan that cannot run: see `Run._rescaled`."""


class Reasons:
    """Of one driver. `patience_s` is how long a checkpoint may take while nothing strikes."""

    def __init__(
        self, struck_us: list[int], patience_s: float, denied: Callable[[str], bool], bug: Callable[[str], None]
    ) -> None:
        self._struck_us = struck_us
        self._denied = denied
        self._patience_s = patience_s
        self._bug = bug
        self._triggered_us: dict[int, int] = {}
        self._judged: set[int] = set()
        self._some_finished = False
        """A task of this driver's job has, or was deployed as finished."""

    def triggered(self, checkpoint_id: int, now_us: int) -> None:
        self._triggered_us.setdefault(checkpoint_id, now_us)

    def is_new(self, checkpoint_id: int) -> bool:
        """Whether nobody has asked for it before."""
        is_new = checkpoint_id not in self._judged
        self._judged.add(checkpoint_id)
        return is_new

    def deployed(self, deploy: m.Deploy) -> None:
        self._some_finished |= bool(deploy.finished)

    def heard(self, message: m.FromSlot, pending_id: int | None) -> None:
        """`pending_id`: of the checkpoint that the driver waits for when this arrives."""
        match message:
            case m.TaskFinished():
                self._some_finished = True
            case m.CheckpointAck(finished=True):
                self._some_finished = True
            case m.TaskFailed() if SIM not in message.summary and SIM not in message.details:
                self._bug(f"task {message.task} fails without a reason: {message.summary}\n{message.details}")
            case m.DeployFailed() if SIM not in message.summary and SMALL_POOL not in message.summary:
                self._bug(f"a slot cannot be deployed, without a reason: {message.summary}\n{message.details}")
            case m.CommitFailed() if not message.stopped and SIM not in message.summary:
                self._bug(f"a commit fails without a reason: {message.summary}\n{message.details}")
            case m.CheckpointDecline(counts=True) if SIM not in message.reason:
                self._bug(f"a declined checkpoint counts as a failure: {message.reason}")
            case m.CheckpointDecline(counts=False, checkpoint_id=declined) if declined == pending_id:
                # That a checkpoint was given up is something that tasks hear after the coordinator has decided it.
                if FINISHED not in message.reason:
                    self._bug(f"{message.task} gives up checkpoint {declined}, which is wanted: {message.reason}")
            case _:  # of the others none says that something failed
                pass

    def checkpoint_failed(self, checkpoint_id: int, reason: str, timeout_s: float) -> None:
        """While its attempt goes on."""
        if SIM in reason or (UNION in reason and self._some_finished):
            return
        if THERE in reason and self._denied(f"chk-{checkpoint_id}"):
            return
        if reason.startswith(OUT_OF_TIME):
            since_us = self._triggered_us[checkpoint_id] - LASTS_US
            struck = sum(at_us >= since_us for at_us in self._struck_us)
            if timeout_s < self._patience_s + struck * LASTS_US / 1e6:
                return
        self._bug(f"checkpoint {checkpoint_id} fails without a reason: {reason}")


def patience_s(scenario: Scenario) -> float:
    """How long a checkpoint may take at most that nothing gets in the way of: a generous bound of what is drawn."""
    s, tempo = scenario, scenario.tempo
    hops = len(s.shape)
    rows = s.rows
    if s.aligned_timeout_s is not None:  # behind the barrier only what a task has taken is waited for
        rows = min(rows, 4 * s.batch_rows)
    work_us = hops * rows * (s.row_us + tempo.clock_tick_us)
    waits_for_sinks = s.sink_rows > 0 and not _overtakes_everywhere(s)
    pause_us = 1e6 * s.sink_pause_s * (rows / s.sink_rows) if waits_for_sinks else 0.0
    way_us = hops * (8 * tempo.data_us + 8 * tempo.control_us + 30 * tempo.io_us + 100 * tempo.mail_us)
    ticks_us = hops * 200 * tempo.clock_tick_us
    return 3 * (work_us + pause_us + way_us + ticks_us) / 1e6 + (s.aligned_timeout_s or 0.0)


def _overtakes_everywhere(scenario: Scenario) -> bool:
    """Whether barriers overtake on every edge there may be, so that none waits until a sink takes a row."""
    if scenario.aligned_timeout_s is None or scenario.changes:
        return False
    inputs = [each for shape in (scenario.shape, scenario.rescaled or ()) for node in shape for each in node.inputs]
    return all(each.partitioning.redistributable and not each.adapts for each in inputs)
