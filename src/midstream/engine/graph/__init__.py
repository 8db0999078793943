"""What runs: the logical graph as written, the job graph with chained operators, and its checks.

May import `core`, `state`, `operators`, `connectors`. Pure data and functions; nothing here runs a job.

`logical`: nodes and streams as the program made them. `build`: the job graph made of it, with its
checks. `job_graph`: what is sent to the slots. `describe`: it as text.
"""
