"""Identifiers: small frozen values that print well and can be sorted."""

from __future__ import annotations

from typing import NamedTuple


class TaskId(NamedTuple):
    """The task that runs subtask `subtask` of job vertex `vertex`."""

    vertex: int
    subtask: int

    def __str__(self) -> str:
        return f"v{self.vertex}/{self.subtask}"


class ChannelId(NamedTuple):
    """The channel of edge `edge` from producer subtask to consumer subtask."""

    edge: int
    producer: int
    consumer: int

    def __str__(self) -> str:
        return f"e{self.edge}:{self.producer}>{self.consumer}"
