"""When the next checkpoint begins, and for whom: the clock, people, a stop, a rescale or move, savepoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from midstream.checkpoint.edge_ends import loses_edges
from midstream.coordinator.placement.rescaling import Stage

if TYPE_CHECKING:
    from midstream.coordinator.machine import Coordinator
    from midstream.coordinator.placement.sources import Sources
    from midstream.graph.job_graph import JobGraph


def trigger_when_due(job: Coordinator, sources: Sources, program: JobGraph) -> None:
    """Of a job whose tasks run. `program`: its graph at the program's own parallelism."""
    attempt, checkpoints, requests, rescaling = job.attempt, job.checkpoints, job.requests, job.rescaling
    assert attempt is not None
    if checkpoints.storage is None or checkpoints.pending is not None or attempt.ending:
        return
    if rescaling.stage is Stage.DEALING:
        return  # a newer one would start the dealing over, and might be one that the job cannot go on from
    if requests.draining and not attempt.at_end_of_data:
        return  # it would hold some sources as ended in the middle of their input, while others could read on
    rescale, savepoint = rescaling.wants_checkpoint, job.savepoints.wants_checkpoint
    wanted = requests.wants_checkpoint or rescaling.is_urgent or savepoint
    if checkpoints.due.is_now(wanted, attempt.awaits_checkpoint):
        clients, is_stop = requests.take_checkpoint(), requests.wants_stop
        align = savepoint or (rescale and rescaling.must_align)
        if is_stop:  # it goes on when the program is started again, at the program's own parallelism
            align = align or loses_edges(job.plan.graph, program)
        asked = clients, is_stop, rescale, savepoint, align
        job.savepoints.triggered(checkpoints.trigger(attempt, sources.snapshot(), *asked))
