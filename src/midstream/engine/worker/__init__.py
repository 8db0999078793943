"""This package runs a slot: its tasks, their operator chains and sources, their snapshots, and the slot itself.

It may import every package below it (`core` … `exchange`). Everything runs on the slot's loop thread. Files are reached
through `Executor.submit`, other slots through the links of `exchange`, and the driver through `send`.

Reading order: task (the states of one subtask, and its next step), task_operators (the source and the operators of a
task), operator_chain (rows and watermarks on their way through operators), task_input (elements read from the gates),
watermark_valve (watermarks of several channels), batch_sizer (the size of slices), source_reader and source_rate
(splits become batches, and the size of these), drift_limit (splits that are too far ahead are held back), task_checkpoints (barriers and rows in flight), task_snapshots (state is
written to files), gate_recovery (rows in flight are read again), failure_reports (exceptions as they are reported),
task_metrics and live_row_sample (metrics and rows that users see); then slot_machine (the messages of a process and the life
of an attempt), interfaces (between a slot, its tasks and their surroundings), deployment (a `Deploy` becomes tasks and
channels), finished_on_restore (the stand-in for a task that had finished), task_scheduler (which task runs next),
slot_committers (sinks that commit on slots).
"""
