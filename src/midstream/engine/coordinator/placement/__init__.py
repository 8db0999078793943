"""What runs where: the slots of the job, the attempts to run it on them, and the splits that its tasks read.

`slots` requests slots, and knows those that have come; an `attempt` says which slot runs which task, and `deploying`
what each slot has to build; `attempts` deploys and cancels attempts, and waits for the slots' answers; `sources`
assigns splits to tasks; `rescaling` takes the job to another parallelism, or off slots that have to leave. `dropped`
counts the rows, timers and records that tasks drop.

May import `restoring`, and `events`, `effects`, `failures` and `phase` of the coordinator.
"""
