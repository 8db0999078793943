"""How a checkpoint comes to be, and what follows from it: what sinks have prepared becomes visible, old files go.

The story: `triggering` says for whom one begins, and `due` when; `checkpoints` has the `pending` one acknowledged and
published, with the metadata that `completing` builds; `committing` makes its output visible, by `committers` on the driver
or by `lanes` on slots; `cleaning` deletes what no checkpoint needs any more. `history` and `state_sizes` keep what
people are shown.

May import `restoring` and `placement`, and `events`, `effects`, `failures` and `phase` of the coordinator.
"""
