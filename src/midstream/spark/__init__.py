"""Everything that uses Spark: slots, sessions, DataFrames, and Python Data Sources.

The only package that imports pyspark. May import every package below it. Its only name for users is `StateSource`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from midstream.spark.state_source import StateSource as StateSource
else:

    def __getattr__(name: str) -> object:
        if name != "StateSource":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from midstream.spark.state_source import StateSource

        return StateSource
