"""The API for users: environments, streams, and loading a job from a file.

May import every package but `simulation` and `cli`; `midstream.spark` only inside functions.
Runs on the user's thread. Every call checks its arguments against the stream it is called on and
appends to the logical graph; nothing runs before `Environment.execute()` or `.start()`.

Reading order: `environment`, `row_transformations` and `data_stream`, `keyed_streams`, `windowed_streams`, `connected_streams`, and `program`, to which they all add.
`argument_checks` checks their arguments, `picklability` detects objects that cannot travel to the slots, `user_modules` finds
the files that travel, `submit` starts the program, and `job_file` finds one in a file.
"""
