"""PostgreSQL tables; the extra `midstream[postgres]`. Begin with `postgres_sink`."""

from midstream.connectors.common.optional_packages import require

require("psycopg", "postgres", "PostgreSQL")
