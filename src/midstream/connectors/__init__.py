"""Both ends of a job: sources and sinks that need nothing but files and memory.

Owns the files a sink writes until they are committed, and nothing else. May import `core`,
`state`, `operators`. Discovery, validation and commits run on the driver's I/O pool; readers and
encoders on a slot's I/O pool; what a writer does on the loop thread is to append to a queue.

Reading order: `files` (`parquet`, `text`), `generator`, `collection`; `queued`, `file_sink`, `collect`.
"""
