"""Known bugs, put back on purpose, one file for each part of the engine: they measure how good the simulator is.

`mutation` defines one, `catalog` lists all, `mutation_score` measures how soon each is found.
"""
