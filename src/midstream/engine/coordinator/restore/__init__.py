"""From which checkpoint the job resumes, what happens to newer output, and which slot gets which part of the state.

`open_directory` examines the checkpoint directory before anything runs, and takes it over; `newer_output` decides about
output that is newer than the checkpoint; `distribute` distributes the state to the slots before each attempt.

May import the events and effects of the coordinator, and no other subpackage. Everything except
`distribute.StateDistribution` runs on the I/O pool.
"""
