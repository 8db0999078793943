"""This package carries elements from task to task in bounded memory, through partitions, channels, gates and links.

It may import `core` and the edge descriptions of `graph`. Everything runs on the slot's loop thread: there are no
locks, threads or sockets here. The transport pumps links through `engine.core.interfaces.ConnectionEnd`.

Reading order: buffer_pool (buffers are charged), batch_lease (until a batch is processed), element_queue (elements
wait, up to a limit), subpartition and result_partition (the producer side), input_channel and input_gate (the consumer
side), listeners (who is notified of what), pool_minimum (how many buffers a job needs), frame_layout and peer_link
(frames between two slots).
"""
