"""A whole job in the calling thread: one slot with all subtasks, virtual time, storage in memory.

The slot is the production one (`engine.worker.slot_machine`), with its tasks, operators, exchange and checkpoints. Its surroundings
are missing: processes, sockets, files, and the coordinator: `engine` sends the slot the few messages
that it needs. May import every package up to `coordinator`; `api` (previews) and `testing` are built on it.

Reading order: `virtual_loop` (time and mails), `rewrite` (from a program to a graph whose ends are in memory), `engine`, then
`preview`, which reads a job's own sources.
"""
