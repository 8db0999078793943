"""Packages that only some jobs need: those of extras."""

from __future__ import annotations

import sys
from importlib import import_module

from midstream.engine.core.errors import ConfigError


def require(module: str, extra: str, who: str) -> None:
    """Raise ConfigError, with the command that installs it, if `module` of that extra is not installed."""
    try:
        import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{who} needs the package {module!r}, which {sys.executable} cannot import ({error}); "
            f"install it there: pip install 'midstream[{extra}]'"
        ) from error
