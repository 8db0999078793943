"""What people and machines see of a job: the command line, live progress, tables.

Looks in from outside: it asks a job through `runtime.client` or a `Job` handle and renders the
`JobStatus` it gets, and never touches the engine. May import every room; `midstream.spark` only
where a command needs it, so that `midstream --help` needs no JVM. Runs on the main thread.
"""
