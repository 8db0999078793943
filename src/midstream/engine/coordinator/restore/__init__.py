"""From which checkpoint the job resumes, what happens to newer output, and which slot gets which part of the state.

`opening` examines the checkpoint directory before anything runs, and takes it over; `going_back` decides about output
that is newer than the checkpoint; `dealing` deals out the state to the slots before each attempt.

May import the events and effects of the coordinator, and no other sub-room. Everything except `dealing.StateDistribution` runs
on the I/O pool.
"""
