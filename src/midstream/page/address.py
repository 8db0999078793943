"""The address at which a page is served, from `--page` and MIDSTREAM_PAGE."""

from __future__ import annotations

import ipaddress
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from midstream.engine.core.errors import ConfigError

LOOPBACK: Final = "127.0.0.1"
VARIABLE: Final = "MIDSTREAM_PAGE"
TOKEN_VARIABLE: Final = "MIDSTREAM_PAGE_TOKEN"
TOKEN_BYTES: Final = 24
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~-]{16,256}")


@dataclass(frozen=True, slots=True)
class PageAddress:
    """An address; `port` 0 is any free one. Outside loopback, everything except the page's own files needs the token."""

    host: str = LOOPBACK
    port: int = 0

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)

    @staticmethod
    def of(text: str | None, environ: Mapping[str, str] = os.environ) -> PageAddress | None:
        """Parse `PORT`, `HOST:PORT` or `off` (None); without a text, MIDSTREAM_PAGE, or else any free port on loopback.

        Raises ConfigError for anything else.
        """
        name = "--page"
        if text is None:
            name, text = VARIABLE, environ.get(VARIABLE, "0")
        if text == "off":
            return None
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]") if colon else LOOPBACK
        if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
            raise ConfigError(f"{name}: {text!r} is not PORT, HOST:PORT or off; a port is 0 (any free one) to 65535")
        return PageAddress(host, int(port))


def token_of(environ: Mapping[str, str] = os.environ) -> str:
    """Return a new token, or that of MIDSTREAM_PAGE_TOKEN. Raises ConfigError for one that is too short or has other
    characters.
    """
    given = environ.get(TOKEN_VARIABLE)
    if given is None:
        return secrets.token_urlsafe(TOKEN_BYTES)
    if not _TOKEN.fullmatch(given):
        raise ConfigError(f"{TOKEN_VARIABLE}: 16 to 256 letters, digits and any of . _ ~ - are needed")
    return given


def is_loopback(host: str) -> bool:
    """Whether the host is only reachable from this machine: by its number, or by the name that browsers never look up."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
