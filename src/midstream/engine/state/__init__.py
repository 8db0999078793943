"""State of operators: keyed heap state, columnar logs, tables, timers, and the form of each at rest.

May import `core`. Runs on a slot's loop thread; what it puts into a snapshot is immutable.
"""
