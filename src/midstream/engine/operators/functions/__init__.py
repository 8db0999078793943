"""Functions with state and timers, and the operators that are made of them.

Reading order: `process_functions` with `process_context`, and `process_operator`, which runs them a row at a time;
`batch_functions`, which process batches; `on_time_functions`, which never get a late row. Of these are `duplicates` and
`time_sort`; `event_time_join` with `interval_join` and `asof_join`; `running_aggregate` (`periodic_aggregate` is made of
windows). `function_operator` is the base; `row_rollback` undoes what a failed row has done.
"""
