"""PostgreSQL tables; the extra `midstream[postgres]`. Begin with `postgres_sink`."""
