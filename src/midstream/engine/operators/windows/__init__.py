"""Windows and what they compute.

Reading order: `window_factory` and `window_specs` (what users write), `aggregates` and `accumulators`, `window_aggregation`
(aggregates bound to a stream), `window_operator` with `pane_windows` and `session_windows`, and `top_rows`;
`window_combiner` and `dense_groupby` make them fast.
"""
