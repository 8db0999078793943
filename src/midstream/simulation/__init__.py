"""The whole engine in one deterministic world: a seed chooses the order of everything, and all faults.

Owns simulated time, processes, network, disks and faults, and runs the production coordinator and
slots on them, unchanged. May import everything but `spark` and `ui`; starts no thread and opens no
socket or file (`campaign` starts processes, one per core, which run their own worlds). A run is a
pure function of its scenario.

Reading order: `world` (time and processes; `trace` records their steps), `network` and `disk`, `rows`, `tally`,
`timed` and `topologies` (the jobs and their expected results), `scenario` (drawn by a seed), `cluster`
(coordinator and slots bound to a world), `faults`, `oracle` (the rules; `lines` for output that belongs together,
`on_disk` for files), `keeper` (starts the job again), `run` (one seed; `recoveries` counts rare cases, `report`
describes a stuck run), `coverage`, `campaign` and `command` (many runs), `mutations` (known bugs).
"""
