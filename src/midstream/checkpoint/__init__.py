"""Checkpoints: barriers in a task, state files, metadata, the store, and who gets which state back.

May import everything up to `protocol`. `barriers` runs on a slot's loop thread; `state_files` and
`store` are I/O and run on I/O threads only; `metadata` and `assign` are pure functions.
"""
