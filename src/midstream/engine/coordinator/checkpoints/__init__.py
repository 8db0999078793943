"""How a checkpoint is made, and what follows from it: prepared output becomes visible, and old files are deleted.

`trigger` decides for which purposes a checkpoint is triggered, and `schedule` when; `checkpoint_coordinator` collects
the acknowledgements of the `pending_checkpoint` and publishes it, with the metadata that `metadata_builder` builds;
`commit_queue` makes its output visible, with `driver_committers` on the driver or with `slot_commit_dispatcher` on
slots; `cleanup` deletes what no checkpoint needs any more. `checkpoint_history` and `state_sizes` keep what the job's status shows.

May import `restore` and `placement`, and `events`, `effects`, `failures` and `job_phase` of the coordinator.
"""
