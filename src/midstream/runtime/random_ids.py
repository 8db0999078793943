"""The source of unique names outside the simulator."""

from __future__ import annotations

import secrets


class RandomIds:
    """Ids (see engine.core.interfaces) from the operating system's randomness."""

    def new_id(self) -> str:
        return secrets.token_hex(8)
