"""Iceberg tables; the extra `midstream[iceberg]`. Begin with `iceberg_sink`."""
