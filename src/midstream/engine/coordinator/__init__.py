"""The coordinator of a job: slots, deployment, failover, checkpoints, splits, commits, and requests from outside.

May import everything up to `worker`. The coordinator is a pure machine on the driver's loop thread: events go in,
instructions come out (`events`), and it has no clock, thread, file or socket of its own. It touches storage only
inside the closures that it hands out in `RunIo`.

Reading order: `events` (its interface), `phase` and `machine` (what comes next), `facts` (which part is told of what,
and in which order), then the sub-rooms, each of which imports only those before it: `restoring` (from which checkpoint
the job resumes), `placement` (what runs where), `checkpointing` (how a checkpoint is made, and what follows from it),
`requests` (what users request and see). `effects` and `failures` are used by all of them. `shell` feeds events to the
machine and carries out its instructions.
"""

from midstream.engine.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
