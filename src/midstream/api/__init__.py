"""What users write: environments, streams, and loading a job from a file.

May import every room but `sim`, `bench` and `ui`; `midstream.spark` only inside functions.
Runs on the user's thread. Every call checks its arguments against the stream it is called on and
appends to the logical graph; nothing runs before `Environment.execute()` or `.start()`.

Reading order: `environment`, `stream`, `keyed`, `connected`, and `program`, to which they all add;
`arguments` checks what they are given; `shipping` says what cannot travel to the slots, `modules` which files do; `submit` starts what was described, `loading` finds
it in a file.
"""
