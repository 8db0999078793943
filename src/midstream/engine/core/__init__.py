"""The vocabulary of every other package: errors, elements, ids, key groups, batches, interfaces, state machines.

Owns no state and starts nothing. Imports nothing of midstream. Runs on any thread.
"""
