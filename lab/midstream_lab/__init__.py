"""The laboratory: how midstream is tested and measured. Never part of the installed package.

Owns the simulator's own jobs with known results (`jobs`), the checkers of what a run leaves behind (`checkers`), the
scenarios that seeds draw (`scenarios`), known bugs that are put back on purpose (`mutations`), and benchmarks (`bench`).
Its commands: `python -m midstream_lab simulate`, `mutations` and `bench`.

Reading order: `scenarios.scenario` (drawn by a seed), `jobs.recorded_rows`, `slot_ledger_sink` and
`real_sinks` (the ends of a job), `jobs.topologies`, `fault_kinds` and `faults`, `run` (one seed; `restarter` starts the job
again, `stuck_report` describes a stuck run), `checkers.checkpoint_checker`, `coverage`, `campaign` and `simulate` (many
runs).
"""
