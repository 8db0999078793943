"""This room carries elements from task to task in bounded memory, through partitions, channels, gates and links.

It may import `core` and the edge descriptions of `graph`. Everything runs on the slot's loop thread: there are no
locks, threads or sockets here. The transport pumps links through `engine.core.interfaces.ConnectionEnd`.

Reading order: pool (buffers are charged), lease (until a batch is processed), queue (elements wait, up to a limit),
subpartition and partition (the producer side), channel and gate (the consumer side), capacity (how large a pool a job
needs), wire and link (frames between two slots).
"""
