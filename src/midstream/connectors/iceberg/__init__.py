"""Iceberg tables; the extra `midstream[iceberg]`. Begin with `iceberg_sink`."""

from midstream.connectors.common.optional_packages import require

require("pyiceberg", "iceberg", "Iceberg")
