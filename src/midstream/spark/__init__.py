"""Everything that uses Spark: slots, sessions, DataFrames, and Python Data Sources.

The only room that imports pyspark. May import every room below it.
"""
