"""Files: `file_source` (with `parquet`, and `csv_jsonl` and what that uses; `directory_watch`) and `file_sink` (with `encoders` and `rollback`)."""
