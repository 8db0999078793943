"""Everything that uses Spark: slots, sessions, DataFrames, and Python Data Sources.

The only package that imports pyspark. May import every package below it.
"""
