"""midstream: a stateful stream processor for Python that runs on Spark."""
