"""What runs where: the slots of the job, the attempts to run it on them, and the splits that its tasks read.

`slot_pool` requests slots, and keeps those that have come; an `attempt` defines which slot runs which task, and
`deploy_messages` what each slot builds; `attempt_deployer` deploys and cancels attempts, and waits for the slots' answers;
`split_assignment` assigns splits to tasks, and `source_drift` keeps them in step in event time; `rescale` takes the job to another parallelism, or off slots that have to
leave; `autoscaler` has it do so by the load, which `load_model` predicts at other parallelisms. `dropped_rows` counts the rows, timers and records that tasks drop.

May import `restore`, and `events`, `effects`, `failures` and `job_phase` of the coordinator.
"""
