"""The production implementation of `engine.core.interfaces`: event loop, TCP, files, processes; the mains of driver and slots.

May import everything up to `coordinator`. One loop thread per process runs all protocol code; the I/O pool runs pure
I/O; only queues need locks. Everything started here ends with its owner's `close`. Importing this package imports
nothing heavy: a slot process limits the threads of its libraries first (see `runtime.process.thread_limits`).
"""
