"""The whole engine in one deterministic world: every order is chosen by a seed, every fault too.

Owns simulated time, processes, network, disks and faults, and runs the production coordinator and
slots on them, unchanged. May import everything but `spark` and `ui`; starts no thread and opens no
socket or file (`campaign` starts processes, one per core, each with worlds of its own). A run is a
pure function of its scenario.

Reading order: `world` (time and processes, `trace` of what they do), `network` and `disk` (what is
between and below them), `rows`, `tally`, `timed` and `topologies` (what is computed), `scenario` (what a
seed draws), `cluster` (coordinator and slots bound to a world), `faults`, `oracle` (what must be true; `lines`:
which output belongs together; `on_disk`: which files), `keeper` (who starts the job again), `run` (one seed;
`recoveries` counts what is rare in it, `report` is of one that is stuck), `coverage`, `campaign` and `command` (many), `mutations`
(known bugs).
"""
