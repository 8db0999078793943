"""What runs: the logical graph as written, the job graph with chained operators, and its checks.

May import `core`, `state`, `operators`. Pure data and functions; nothing here runs a job.
"""
