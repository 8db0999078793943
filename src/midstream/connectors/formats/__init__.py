"""Formats of values, for any connector: Avro and Protobuf, and a Confluent schema registry."""
