"""The engine: what a job does on its driver and in its slots, as pure steps.

One rule holds for everything below this folder: no clock, no randomness, no thread, no file and no socket. Time, storage and
connections come through the interfaces of `engine.core.interfaces`, so that the same code runs in production
(`runtime`), in a test (`inprocess`) and in the simulator (`simulation`).

Low to high, each folder imports only those before it: `core`, `state`, `operators`, `graph`, `protocol`, `checkpoint`,
`exchange`, `worker` (a slot and its tasks), `coordinator` (the driver's side).
"""
