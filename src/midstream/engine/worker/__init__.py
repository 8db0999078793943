"""This room runs a slot: its tasks, their operator chains and sources, their snapshots, and the slot itself.

It may import every room below it (`core` … `exchange`). Everything runs on the slot's loop thread. Files are reached
through `Executor.submit`, other slots through the links of `exchange`, and the driver through `send`.

Reading order: task (the states of one subtask, and its next step), operators (the source and the operators of a task),
chain (rows and watermarks on their way through operators), inputs (elements read from the gates), valve (watermarks of
several channels), pace (the size of slices), source and source_pace (splits become batches, and the size of these),
task_checkpoints (barriers and rows in flight), snapshots (state is written to files), recovery (rows in flight are read
again), failures (exceptions as they are reported), task_metrics and live_rows (figures and rows that users see); then
slot (the messages of a process and the life of an attempt), services (the interfaces between a slot, its tasks and their
surroundings), assembly (a `Deploy` becomes tasks and channels), finished (the stand-in for a task that had finished),
scheduler (which task runs next), commits (sinks that commit on slots).
"""
