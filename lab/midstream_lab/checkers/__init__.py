"""Checkers: what must hold of rows, states, event time, watermarks, windows and files, at each checkpoint and at the end.

Begin with `checkpoint_checker`, which uses the others.
"""
