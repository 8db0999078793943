"""State of operators: keyed heap state, columnar logs, tables, timers, and the encoding of each in checkpoints.

May import `core`. Runs on a slot's loop thread; what it puts into a snapshot is immutable.
"""
