"""Local paths in a form that all processes of the job can use: absolute, and not deleted with a container."""

from __future__ import annotations

import os
from typing import Final

from midstream.engine.core.errors import ConfigError

YARN_CONTAINER: Final = "CONTAINER_ID"
"""YARN sets this variable in each container; the container's working directory ends with its value."""


def absolute_path(path: str) -> str:
    """Return a path that means the same file to every process of this machine, in any working directory.

    Raises ConfigError for a path below the working directory of a YARN container, which YARN deletes with the
    container.
    """
    found = os.path.abspath(os.path.expanduser(path))
    container = os.environ.get(YARN_CONTAINER)
    if container and container in found.split(os.sep):
        raise ConfigError(
            f"the path {path!r} is {found} here, and YARN deletes this directory when its container {container} ends; "
            "give a URL, or an absolute path that all nodes reach"
        )
    return found
