"""How a checkpoint comes to be, and what follows from it: what sinks have prepared becomes visible, old files go.

The story: `triggering` says when one begins and for whom; `checkpoints` has it acknowledged and published, with the
metadata that `completing` builds; `committing` makes its output visible, on the driver or by `lanes` on slots; `cleaning`
deletes what no checkpoint needs any more. `history` and `state_sizes` keep what people are shown.

May import `restoring` and `placement`, and events, effects and failures of the coordinator.
"""
