"""Both ends of a job: sources and sinks that need nothing but files and memory; PostgreSQL and Delta as extras.

Owns what a sink has prepared until it is committed, and nothing else. The packages of extras are
imported where they are used (`extras`). May import `core`, `state`, `operators`. Discovery,
validation and commits run on the driver's I/O pool; readers and encoders on a slot's I/O pool; what
a writer does on the loop thread is to append to a queue.

Reading order: `files` (`parquet`, `text`), `generator`, `collection`; `queued`, `rolling`, `file_sink`,
`collect`; `postgres` (`postgres_tables`, `postgres_rows`), `delta` (`delta_tables`).
"""
