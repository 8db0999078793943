"""Checks whether each failure in a run has a cause: a fault that struck and that can explain this failure.

Every failure that the simulator causes contains `[sim]`, and the engine passes reasons on. So a task or
a checkpoint that fails without that mark has failed because of a bug. A timeout does not name its
cause: it is judged by the time that the job may rightly take, and by the faults that have struck since
the checkpoint was triggered, or so shortly before that their effects may last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from midstream.engine.protocol import messages as m
from midstream.simulation.network import SIM

LASTS_US: Final = 6_000_000
"""The longest time after which a fault may still cause a timeout; later effects name it in their reason."""
OUT_OF_TIME: Final = "not complete within "
THERE: Final = " exists already"
UNION: Final = "and only some of its subtasks have finished"
FINISHED: Final = " has finished"
SMALL_POOL: Final = "pool_size: the tasks of one slot need at least"
"""The error of a plan whose pool is too small on purpose; see `Run._rescaled`."""


class FailureCauses:
    """The checks of one driver. `patience_s` is how long a checkpoint may take while no fault strikes."""

    def __init__(
        self, struck_us: list[int], patience_s: float, denied: Callable[[str], bool], bug: Callable[[str], None]
    ) -> None:
        self._struck_us = struck_us
        self._denied = denied
        self._patience_s = patience_s
        self._bug = bug
        self._triggered_us: dict[int, int] = {}
        self._some_finished = False
        """Whether a task of this driver's job has finished, or was deployed as finished."""

    def triggered(self, checkpoint_id: int, now_us: int) -> None:
        self._triggered_us.setdefault(checkpoint_id, now_us)

    def deployed(self, deploy: m.Deploy) -> None:
        self._some_finished |= bool(deploy.finished)

    def on_message(self, message: m.FromSlot, pending_id: int | None) -> None:
        """Check a message of a slot. `pending_id`: the checkpoint for which the driver is waiting; None if there is
        none.
        """
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
                # Tasks are notified that a checkpoint was given up only after the coordinator has decided it.
                if FINISHED not in message.reason:
                    self._bug(
                        f"{message.task} gives up checkpoint {declined}, which is still pending: {message.reason}"
                    )
            case _:  # no other message reports a failure
                pass

    def checkpoint_failed(self, checkpoint_id: int, reason: str, timeout_s: float) -> None:
        """Check the reason of a checkpoint that has failed while its attempt continues."""
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
