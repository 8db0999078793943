"""Formats of values, for any connector: Avro and Protobuf."""
