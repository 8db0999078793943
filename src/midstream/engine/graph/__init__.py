"""The graphs of a job: the logical graph as written, the job graph with chained operators, and its checks.

May import `core`, `state` and `operators`. Pure data and functions; nothing here runs a job.

`logical_graph`: nodes and streams as the program made them. `graph_builder`: builds and checks the job graph.
`job_graph`: what is sent to the slots. `describe`: the job graph as text. `unaligned_edges`, `idleness`, `drift_groups`:
what barriers, watermarks and the drift of sources need of it.
"""
