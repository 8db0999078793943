"""Benchmarks: real jobs on real slots, with results that are checked before they are reported.

Owns the workloads and how they are measured. May import every package but `page`; `simulation` only to measure it. Runs on the main
thread; its parts in slots (generators, a summing sink) run there like any user's code. Reading order: `measuring`,
`events`, `summing_sink`, then `window`, `udf`, `lookup`, `keyed_process`, `strings`, `sliding`, `operators`, `exchange`,
`latency`; `checkpoint`, and `recovery` of the same job; `nexmark`; `simulate`.
"""
