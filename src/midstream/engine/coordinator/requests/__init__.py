"""What clients request of a running job, and what its status shows.

`requests` keeps the clients that wait for a checkpoint or a stop, `savepoints` makes savepoints, `status` describes the
job with the help of `event_time` and `user_metrics`, and `waiting` names what the job waits for, with the limits of
these waits. A rescale, which clients request as well, is in `placement`.

May import all other sub-rooms, and `events`, `effects`, `failures` and `phase` of the coordinator.
"""
