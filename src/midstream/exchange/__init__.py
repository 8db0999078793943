"""How elements get from one task to another: pool, partitions, channels, gates, links.

May import `core` (and the edge descriptions of `graph`). Confined to a slot's loop thread: no locks,
no threads, no sockets; links are pumped by the transport through `core.seams.LinkEnd`.

Reading order: pool (what is charged), lease (until when), queue (what waits, and how much of it may),
subpartition and partition (producer side), channel and gate (consumer side), capacity (how large a pool
a job needs), wire and link (what crosses between slots).
"""
