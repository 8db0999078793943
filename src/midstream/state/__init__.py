"""State of operators: keyed heap state, columnar log state, tables, timers, and its form at rest.

May import `core`. Runs on a slot's loop thread; what it hands out in a snapshot is immutable.
"""
