"""Changes of a database as rows: each row has its operation."""

from __future__ import annotations

from typing import Final

OP: Final = "_op"
"""The column with the operation of a row."""
INSERT: Final = "insert"
UPDATE: Final = "update"
DELETE: Final = "delete"
