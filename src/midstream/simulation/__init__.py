"""The simulator: the production coordinator and slots, unchanged, in one deterministic world.

Owns simulated time, processes, network, disks and faults. A run depends only on its seed. Starts no thread and opens no
socket or file. `testing` runs users' jobs in it; the project's laboratory (`midstream_lab`, which is not in the package)
runs jobs of its own, with the checkers and the known bugs that test the engine.

Reading order: `world` (time and processes; `trace` records their steps), `network` and `disk`, `cluster` (coordinator
and slots bound to a world), `faults`, `outside` and `ledger_sink` (what a job writes to), and `message_checker`, which checks
what every driver sends.
"""
