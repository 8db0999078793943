"""Users' functions with state and timers.

Reading order: `process_functions` with `process_context`, and `process_operator`, which runs them a row at a time;
`batch_functions`, which process batches; `timely_functions`, which never get a late row; `duplicates` and `time_sort`,
which are some of these; `event_time_join` with `interval_join` and `asof_join`. `function_operator` is the base.
"""
