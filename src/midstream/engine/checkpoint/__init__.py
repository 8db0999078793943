"""Checkpoints: barriers in a task, state files, metadata, the store, and the assignment of state to tasks.

May import everything up to `protocol`. `barrier_handler` runs on a slot's loop thread; `state_files`, `channel_state`
(both with `extents`), `store` and `savepoint` are I/O and run on I/O threads only; `metadata`, `redistribute_state`,
`redistribute_channel_state`, `channel_state_references` and `compatibility` are pure functions.
"""
