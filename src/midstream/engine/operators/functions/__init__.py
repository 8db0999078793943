"""Users' functions with state and timers.

Reading order: `process_functions` with `process_context`, and `process_operator`, which runs them a row at a time;
`batch_functions`, which process batches; `timely_functions`, which never get a late row; `interval_join`, which is one
of the functions on batches. `function_operator` is the base.
"""
