"""A slot's process: its main, its start as a child process, its limits, its heartbeats and its output.

Importing this package imports nothing heavy: a slot process limits the threads of its libraries first (`thread_limits`).
"""
