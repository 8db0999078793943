"""Benchmarks: real jobs on real slots, with results that are checked before they are reported.

Owns the workloads and how they are measured. May import every room but `sim`, `testing` and `ui`.
Runs on the main thread; what it does in slots (generators, a sink that adds up) runs there like any
user's code. Reading order: `measuring`, `summing_sink`, then `window`, `exchange`, `latency`.
"""
