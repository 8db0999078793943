"""What users of polars, Spark and Flink type, and what it is called here."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

_AGGREGATE: Final = "key_by(…).aggregate(n=Count()) for a result per row, or key_by(…).window(…).aggregate(n=Count())"
_SORT: Final = "key_by(…).sort_by_time() for the order of event time, or collect(), and sort what arrived"
_UNIQUE: Final = "drop_duplicates('id', within='1 h'), or distinct() for all columns"
_BATCHES: Final = "map_batches(function, schema)"

OF_STREAMS: Final = {
    **dict.fromkeys(("where", "filterNot"), "filter(pl.col('x') > 0)"),
    **dict.fromkeys(("withColumn", "withColumns", "with_column", "assign", "mutate"), "with_columns(name=expression)"),
    "withColumnRenamed": "rename({'old': 'new'})",
    "withColumnsRenamed": "rename({'old': 'new'})",
    "selectExpr": "select(pl.sql_expr('…'))",
    **dict.fromkeys(("groupBy", "group_by", "groupby", "keyBy", "group_by_dynamic", "rolling"), "key_by('column')"),
    **dict.fromkeys(("agg", "aggregate", "reduce", "sum", "count", "mean", "min", "max"), _AGGREGATE),
    **dict.fromkeys(("withWatermark", "assign_timestamps_and_watermarks"), "with_watermarks('column', WatermarkStrategy.bounded('5 s'))"),
    **dict.fromkeys(("show", "head", "limit", "take", "first", "tail"), "preview(20), which returns the first rows; a source may end early instead: generate(…, count=20)"),
    **dict.fromkeys(("join_where", "crossJoin", "merge_asof", "interval_join", "intervalJoin"), "join(other, on='column', within=('-1 min', '1 min')), or key_by(…).connect(other.key_by(…)).process(…)"),
    **dict.fromkeys(("lookup", "lookup_join", "enrich"), "join_table(table, on='column', refresh='5 min')"),
    **dict.fromkeys(("flatMap", "explode"), "flat_map(function, schema)"),
    **dict.fromkeys(("async_map", "mapAsync", "orderedWait", "unorderedWait"), "map_async(function, schema), with ordered=False for results as they come"),
    **dict.fromkeys(("map_partitions", "mapInPandas", "mapInArrow", "mapPartitions", "map_batch"), _BATCHES),
    **dict.fromkeys(("sort", "orderBy", "order_by", "sort_by"), _SORT),
    **dict.fromkeys(("process_batches", "apply", "foreach", "foreachBatch"), "key_by(…).process(function, schema) for a function with state, or map, flat_map and map_batches without"),
    **dict.fromkeys(("cache", "persist"), "the stream itself: each use of it reads the same rows"),
    **dict.fromkeys(("toPandas", "to_pandas", "to_polars"), "collect(), whose frame() is what arrived"),
    **dict.fromkeys(("unique", "dropDuplicates", "dropDuplicatesWithinWatermark"), _UNIQUE),
    **dict.fromkeys(("unionAll", "unionByName", "union_all", "concat"), "union(other)"),
    **dict.fromkeys(("add_sink", "sink_to", "writeStream", "write", "write_csv"), "sink(…), or write_parquet, write_jsonl, write_kafka, write_delta, write_iceberg, write_postgres"),
    **dict.fromkeys(("window", "windowAll"), "key_by(…).window(…), or window_all(…)"),
    **dict.fromkeys(("shuffle", "repartition"), "rebalance()"),
    "dropna": "filter(pl.col('x').is_not_null())",
    "drop_nulls": "filter(pl.col('x').is_not_null())",
    "cast": "with_columns(pl.col('x').cast(…))",
    "printSchema": "schema",
    "dtypes": "schema",
}  # fmt: skip
OF_KEYED_STREAMS: Final = {
    **dict.fromkeys(("agg", "reduce", "sum", "count", "mean", "min", "max"), "aggregate(n=Count(), …) for a result per row, or window(…).aggregate(n=Count(), …)"),
    **dict.fromkeys(("filter", "select", "with_columns", "map", "map_async", "flat_map", "map_batches", "drop", "rename", "union", "with_watermarks", "drop_duplicates", "distinct", "join_table"), "it before key_by()"),
    **dict.fromkeys(("sort", "orderBy", "order_by", "sort_by"), "sort_by_time()"),
    **dict.fromkeys(("join", "join_asof", "interval_join", "intervalJoin"), "join(other, on='column', within=('-1 min', '1 min')) of the stream before key_by()"),
    "flatMap": "process(…)",
    "countWindow": "window(count(100))",
}  # fmt: skip
OF_CONNECTED_STREAMS: Final = {
    **dict.fromkeys(("interval_join", "intervalJoin", "join"), "join(other, on='column', within=('-1 min', '1 min')) of the first stream, without connect()"),
}  # fmt: skip
OF_WINDOWS: Final = {
    **dict.fromkeys(("top_k", "bottom_k", "limit", "head", "sort", "orderBy"), "top(3, by='x'), with descending=False for the smallest"),
    **dict.fromkeys(("agg", "reduce"), "aggregate(n=Count(), …), also with an Aggregate or Accumulator of your own"),
    **dict.fromkeys(("sum", "count", "mean", "min", "max", "first", "last"), "aggregate(n=Count(), total=Sum('x'), …)"),
    **dict.fromkeys(("apply", "map_groups"), "process(function, schema), whose function gets all rows of a window"),
    "allowedLateness": "allowed_lateness('1 min')",
    **dict.fromkeys(("trigger", "emit"), "emit_every('10 s') for early results"),
    "sideOutputLateData": "aggregate(…).side_output(LATE)",
}  # fmt: skip

OF_ENVIRONMENTS: Final = {
    **dict.fromkeys(("read_csv", "read_json", "read_jsonl", "read_parquet", "scan_csv", "scan_parquet", "read", "readStream", "read_text"), "read_files(path, format='csv')"),
    **dict.fromkeys(("from_elements", "createDataFrame", "from_pandas", "from_polars", "from_arrow", "from_dicts"), "from_collection(rows), which takes dicts and polars or Arrow tables"),
    **dict.fromkeys(("add_source", "from_source", "addSource"), "source(…)"),
    **dict.fromkeys(("run", "execute_async"), "execute(), or start() to continue while the job runs"),
    **dict.fromkeys(("set_parallelism", "enable_checkpointing"), "Environment(name, parallelism=…, checkpoint_dir=…, checkpoint_interval=…)"),
}  # fmt: skip


class Hinted:
    """Attributes that do not exist raise an AttributeError that names what to use."""

    _hints: ClassVar[dict[str, str]] = {}

    if not TYPE_CHECKING:  # a type checker refuses what does not exist

        def __getattr__(self, name: str) -> NoReturn:
            hint = f"; use {self._hints[name]}" if name in self._hints else ""
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint}", name=name, obj=self)
