"""The real world behind the five interfaces: event loop, TCP, files, processes; slot and driver mains.

May import everything up to `coordinator`. One loop thread per process carries all protocol code;
the I/O pool carries pure I/O; nothing here needs a lock but a queue. Everything started here ends
with its owner's `close`. Importing this package imports nothing heavy: a slot process limits the
threads of its libraries first (see `runtime.threads`).
"""
