"""From which checkpoint the job goes on, what becomes of newer output, and who gets which part of the state.

The story: `opening` looks at the checkpoint directory before anything runs and takes it over, `going_back` decides about
output that is newer than the checkpoint, `dealing` deals its state out to the slots before each attempt.

May import the events and effects of the coordinator, no other sub-room. All but `dealing.Restoring` runs on the I/O pool.
"""
