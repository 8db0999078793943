"""Checkpoints: barriers in a task, state files, metadata, the store, and the assignment of state to tasks.

May import everything up to `protocol`. `barriers` runs on a slot's loop thread; `state_files`, `channel_state` (both
with `extents`), `store` and `savepoint` are I/O and run on I/O threads only; `metadata`, `assign`, `assign_channels`,
`references` and `compatible` are pure functions.
"""
