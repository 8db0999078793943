"""Both ends of a job: sources and sinks for files and memory; PostgreSQL and Delta tables as extras.

Owns what a sink has prepared until it is committed, and nothing else. Packages of extras are imported only where they
are used (`extras`). May import `core`, `state`, `operators`. Discovery, validation and commits run on the driver's I/O
pool; readers and encoders on a slot's I/O pool; on the loop thread, a writer only appends to a queue.

Reading order: `files` (with `filesystem`, `formats`, `parquet`, `text`, `cursor`), `generator`, `collection`; `queued`,
`rolling`, `file_sink` (with `encoders`), `collect`, `print_sink`; `postgres` (with `postgres_tables`, `postgres_rows`),
`delta` (with `delta_tables`).
"""
