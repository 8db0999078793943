"""What a slot does: tasks, their operator chains and sources, snapshots, and the slot itself.

May import everything below it (`core` … `exchange`). Confined to the slot's loop thread; files
are reached through `Executor.submit`, peers through `exchange` links, the driver through `send`.

Reading order: task (the states of one subtask, and what it does next), operators (its source and
its operators), chain (rows and watermarks through operators), inputs (what comes through the gates),
valve (watermarks of several channels), pace (how large slices are), source and source_pace (splits
into batches, and how large), checkpoints (barriers, and what is in flight), snapshots (state into
files), recovery (what was in flight, read again), failures (what is told of an exception),
task_metrics and live_rows (what people see of it); then slot (the messages of a process and the life
of an attempt), seams (by what slot and tasks reach the outside), assembly (from a `Deploy` to tasks
and channels), finished (what stands for a task that had finished), scheduler (which task runs next),
commits (sinks that commit on slots).
"""
