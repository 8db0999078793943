"""The job's one head: slots, deployment, failover, checkpoints, splits, commits, questions from outside.

May import everything up to `worker`. A pure machine on the driver's loop thread: events in,
instructions out (`events`), no clock, thread, file or socket of its own. Storage is touched only
inside the closures that it hands out in `RunIo`.

Reading order: `events` (its border), `machine` (what comes next), `attempt` (who runs what),
`attempts`, `opening`, `deploying`, `checkpoints` (with `completing`, `cleaning`), `committing`, `sources`,
`slots`, `requests`, `savepoints`, `rescaling`, `failures`; `effects`, `phase` and `status` on the way. `shell` feeds
the machine and carries out its instructions.
"""

from midstream.coordinator.machine import Coordinator

__all__ = ["Coordinator"]
