"""The seeds of a campaign, as users give them."""

from __future__ import annotations

import re

from midstream.engine.core.errors import ConfigError


def parse_seeds(text: str) -> range:
    """Parse `A:B`, or `N` for a single seed."""
    match = re.fullmatch(r"(\d+)(?::(\d+))?", text.strip())
    if match is None:
        raise ConfigError(f"seeds: {text!r} is not A:B (B not included) or a single number")
    first = int(match[1])
    end = int(match[2]) if match[2] is not None else first + 1
    if end <= first:
        raise ConfigError(f"seeds: {text!r} is empty; the second number must be larger than the first")
    return range(first, end)
