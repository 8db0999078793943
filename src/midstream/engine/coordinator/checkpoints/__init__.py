"""How a checkpoint is made, and what follows from it: prepared output becomes visible, and old files are deleted.

`triggering` decides for which purposes a checkpoint is triggered, and `due` when; `checkpoints` collects the
acknowledgements of the `pending` one and publishes it, with the metadata that `completing` builds; `committing` makes
its output visible, by `committers` on the driver or by `lanes` on slots; `cleaning` deletes what no checkpoint needs
any more. `history` and `state_sizes` keep what the job's status shows.

May import `restoring` and `placement`, and `events`, `effects`, `failures` and `phase` of the coordinator.
"""
