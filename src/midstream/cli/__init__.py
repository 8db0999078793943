"""The command line, live progress and tables: what users and programs see of a job.

It observes from outside: it queries a job through `runtime.driver.client` or a `Job` handle, renders the `JobStatus`, and
never touches the engine. May import every package; `midstream.spark` only where a command needs it, so that `midstream
--help` needs no JVM. Runs on the main thread.
"""
