"""What a slot does: tasks, their operator chains and sources, snapshots, and the slot itself.

May import everything below it (`core` … `exchange`). Confined to the slot's loop thread; files
are reached through `Executor.submit`, peers through `exchange` links, the driver through `send`.

Reading order: chain (rows and watermarks through operators), valve (watermarks of several
channels), inputs (what comes through the gates), source (splits into batches), snapshots (state
into files), checkpoints (barriers, and what is in flight), recovery (what was in flight, read
again), failures (what is told of an exception), task (one subtask), slot (all tasks of a process).
"""
