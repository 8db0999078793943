"""What runs where: the slots of the job, the attempts to run it on them, the splits that its tasks read.

The story: `slots` are asked for and come; an `attempt` says which of them runs which task, and `deploying` tells each
what to build; `attempts` has them answer, and cancels them after a failure; `sources` hands splits to the tasks that
run; `rescaling` takes them all to another parallelism, or off slots that have to leave. `dropped` counts what tasks lose.

May import `restoring`, and `events`, `effects`, `failures` and `phase` of the coordinator.
"""
