"""The coordinator of a job: slots, deployment, failover, checkpoints, splits, commits, and requests from outside.

May import everything up to `worker`. The coordinator is a pure machine on the driver's loop thread: events go in,
instructions come out (`events`), and it has no clock, thread, file or socket of its own. It touches storage only
inside the closures that it hands out in `RunIo`.

Reading order: `events` (its interface), `job_phase` and `coordinator` (what comes next), `notifications` (which part is
notified of what, and in which order), then the subpackages, each of which imports only those before it: `restore` (from
which checkpoint the job resumes), `placement` (what runs where), `checkpoints` (how a checkpoint is made, and what
follows from it), `requests` (what users request and see). `effects` and `failures` are used by all of them;
`restart_backoff` decides about the next attempt. `shell`
feeds events to the coordinator and carries out its instructions; `recent_events` keeps the last events for errors.
"""

from midstream.engine.coordinator.coordinator import Coordinator

__all__ = ["Coordinator"]
