"""What each slot is told to build. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from midstream.coordinator.events import JobPlan
from midstream.coordinator.placement.attempt import Attempt
from midstream.coordinator.restoring.dealing import Dealt
from midstream.protocol.messages import Deploy


def deployments(
    plan: JobPlan, attempt: Attempt, state: Dealt, epoch: int, graph_for: Callable[[int, bytes], bytes]
) -> Iterator[tuple[int, Deploy]]:
    """For each slot of the attempt: its tasks, and of the state to restore what is theirs.

    `graph_for(slot, graph)`: what it is to be sent of the pickled graph, see `Slots.graph_for`.
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
