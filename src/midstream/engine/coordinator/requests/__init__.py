"""What clients request of a running job, and what its status shows.

`client_requests` keeps the clients that wait for a checkpoint or a stop, `savepoints` makes savepoints,
`status_builder` describes the job with the help of `event_time_status` and `metric_totals`, and `pending_waits` names
what the job waits for, with the limits of these waits. A rescale, which clients request as well, is in `placement`.

May import all other subpackages, and `events`, `effects`, `failures` and `job_phase` of the coordinator.
"""
