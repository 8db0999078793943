"""Makes the `Deploy` message of each slot. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from midstream.engine.coordinator.events import JobPlan
from midstream.engine.coordinator.placement.attempt import Attempt
from midstream.engine.coordinator.restore.distribute import DistributedState
from midstream.engine.protocol.messages import Deploy


def deployments(
    plan: JobPlan, attempt: Attempt, state: DistributedState, epoch: int, graph_for: Callable[[int, bytes], bytes]
) -> Iterator[tuple[int, Deploy]]:
    """Yield, for each slot of the attempt, its tasks with the state that they restore.

    `graph_for(slot, graph)` returns the pickled graph if the slot does not have it yet, see `SlotPool.graph_for`.
    """
    config = msgspec.msgpack.encode(plan.config)
    for index, (slot, tasks) in enumerate(attempt.tasks_by_slot().items()):
        yield (
            slot,
            Deploy(
                job_id=plan.job_id,
                attempt=attempt.number,
                config=config,
                graph=graph_for(slot, plan.graph_bytes),
                slots=attempt.slots,
                tasks=tuple(tasks),
                restore=state.slots[index] if state.slots else b"",
                finished=tuple(ref for ref in tasks if ref in state.finished),
                checkpoint_root=plan.config.checkpoint_dir,
                epoch=epoch,
            ),
        )
