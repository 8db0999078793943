"""The API for users: environments, streams, and loading a job from a file.

May import every room but `sim`, `bench` and `ui`; `midstream.spark` only inside functions.
Runs on the user's thread. Every call checks its arguments against the stream it is called on and
appends to the logical graph; nothing runs before `Environment.execute()` or `.start()`.

Reading order: `environment`, `stream`, `keyed`, `connected`, and `program`, to which they all add.
`arguments` checks their arguments, `shipping` detects objects that cannot travel to the slots, `modules` finds
the files that travel, `submit` starts the program, and `loading` finds one in a file.
"""
