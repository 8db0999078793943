"""The job's one head: slots, deployment, failover, checkpoints, splits, commits, questions from outside.

May import everything up to `worker`. A pure machine on the driver's loop thread: events in,
instructions out (`events`), no clock, thread, file or socket of its own. Storage is touched only
inside the closures that it hands out in `RunIo`.

Reading order: `events` (its border), `phase` and `machine` (what comes next), `facts` (who hears of what, in which
order), then the sub-rooms, each of which tells one story and imports only those before it: `restoring` (from which
checkpoint the job goes on), `placement` (what runs where), `checkpointing` (how a checkpoint comes to be, and what
follows from it), `requests` (what people ask and see).
`effects` and `failures` on the way. `shell` feeds the machine and carries out its instructions.
"""

from midstream.coordinator.machine import Coordinator

__all__ = ["Coordinator"]
