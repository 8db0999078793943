"""Kafka.

Reading order: `client` and `cluster`; `kafka_source`, with `source_bounds`, `record_parser` and `fetched_records`
(`fetch_probe` decides how records are read); `kafka_sink`, with `staged_writer` and `staged_records`, and `committer`,
which carries out what `commit_protocol` decides, with a `transactional_producer`; `avro_values` and `protobuf_values`,
with `schema_registry`.
"""

from midstream.connectors.common.optional_packages import require

require("confluent_kafka", "kafka", "Kafka")
