"""What users write: environments, streams, and loading a job from a file.

May import every room but `sim`, `testing`, `bench` and `ui`; `midstream.spark` only inside functions.
Runs on the user's thread. Every call checks its arguments against the stream it is called on and
appends to the logical graph; nothing runs before `Environment.execute()` or `.start()`.

Reading order: `environment`, `stream`, `keyed`, `connected`; `submit` starts what they describe.
"""
