"""What users of polars, Spark and Flink type, and what it is called here."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Final, NoReturn

_AGGREGATE: Final = "key_by(…).aggregate(n=Count()) for a result per row, or key_by(…).window(…).aggregate(n=Count())"
_SORT: Final = "collect(), and sort what arrived: a stream has no end at which it could be sorted"
_UNIQUE: Final = "key_by(…).process(…) with a ValueState that records whether the key has occurred"
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
    **dict.fromkeys(("join", "join_asof", "join_where", "crossJoin"), "key_by(…).connect(other.key_by(…)), then interval_join(…) or process(…)"),
    **dict.fromkeys(("flatMap", "explode"), "flat_map(function, schema)"),
    **dict.fromkeys(("map_partitions", "mapInPandas", "mapInArrow", "mapPartitions", "map_batch"), _BATCHES),
    **dict.fromkeys(("sort", "orderBy", "order_by", "sort_by"), _SORT),
    **dict.fromkeys(("process", "process_batches", "apply", "foreach", "foreachBatch"), "key_by(…).process(function, schema) for a function with state, or map, flat_map and map_batches without"),
    **dict.fromkeys(("cache", "persist"), "the stream itself: each use of it reads the same rows"),
    **dict.fromkeys(("toPandas", "to_pandas", "to_polars"), "collect(), whose frame() is what arrived"),
    **dict.fromkeys(("unique", "distinct", "dropDuplicates", "drop_duplicates", "dropDuplicatesWithinWatermark"), _UNIQUE),
    **dict.fromkeys(("unionAll", "unionByName", "union_all", "concat"), "union(other)"),
    **dict.fromkeys(("add_sink", "sink_to", "writeStream", "write", "write_csv"), "sink(…), or write_parquet, write_jsonl, write_kafka, write_delta, write_postgres"),
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
    **dict.fromkeys(("filter", "select", "with_columns", "map", "flat_map", "map_batches", "drop", "rename", "union", "with_watermarks"), "it before key_by()"),
    **dict.fromkeys(("join", "interval_join"), "connect(other.key_by(…)), then interval_join(…) or process(…)"),
    "flatMap": "process(…)",
}  # fmt: skip
OF_WINDOWS: Final = {
    **dict.fromkeys(("agg", "reduce", "process", "apply"), "aggregate(n=Count(), …), also with an Aggregate or Accumulator of your own"),
    **dict.fromkeys(("sum", "count", "mean", "min", "max", "first", "last"), "aggregate(n=Count(), total=Sum('x'), …)"),
    "allowedLateness": "allowed_lateness('1 min')",
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
