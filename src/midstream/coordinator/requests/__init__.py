"""What people ask of a job while it runs, and what they see of it.

The story: `requests` keeps who waits for a checkpoint or a stop, `savepoints` makes copies for keeps, `status` shows the job
with `event_time` and `user_metrics`, and `waiting` names what is waited for, and for how long it may be.
A rescale is asked for here, and is a matter of `placement`.

May import all other sub-rooms, and `events`, `effects`, `failures` and `phase` of the coordinator.
"""
