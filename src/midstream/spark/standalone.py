"""Queries a standalone Spark master about this application: Spark itself does not report that a restarted master no
longer knows it, nor how many cores of executors that are starting it has.
"""

from __future__ import annotations

import http.client
from dataclasses import dataclass
from typing import Final

import msgspec
from pyspark import SparkContext

TIMEOUT_S: Final = 5.0
_PREFIX: Final = "spark://"
_PAGE_PORT: Final = "spark.master.ui.port"


class _Application(msgspec.Struct):
    id: str
    cores: int = 0


class _MasterState(msgspec.Struct):
    """What the page of a master has at /json/."""

    status: str
    activeapps: tuple[_Application, ...] = ()


@dataclass(frozen=True, slots=True)
class AtMaster:
    """This application as its master has it."""

    is_known: bool
    cores: int = 0
    """The cores of its executors, those that are starting included."""


def at_master(context: SparkContext) -> AtMaster | None:
    """Return what the page of the master has; None if there is no standalone master, or no page answers. Blocks."""
    for address in (context.master or "").removeprefix(_PREFIX).split(","):
        try:
            port = int(context.getConf().get(_PAGE_PORT) or "8080")
            answer = _page_of(address.rpartition(":")[0].strip("[]"), port)
        except (OSError, http.client.HTTPException, msgspec.MsgspecError, ValueError):
            continue  # this one is away, or its page is at another port, or needs a login
        if answer.status == "ALIVE":
            cores = next((app.cores for app in answer.activeapps if app.id == context.applicationId), None)
            return AtMaster(cores is not None, cores or 0)
    return None


def is_standalone(context: SparkContext) -> bool:
    return (context.master or "").startswith(_PREFIX)


def registered(context: SparkContext) -> int:
    """Return the number of executors that have registered with this program. Raises Py4JError or OSError."""
    return int(context._jsc.sc().getExecutorMemoryStatus().size()) - 1  # the driver is among them


def _page_of(host: str, port: int) -> _MasterState:
    connection = http.client.HTTPConnection(host, port, timeout=TIMEOUT_S)
    try:
        connection.request("GET", "/json/")
        return msgspec.json.decode(connection.getresponse().read(), type=_MasterState)
    finally:
        connection.close()
