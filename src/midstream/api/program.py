"""The program under construction: the logical graph, how to make each operator anew, and where calls come from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import pyarrow as pa

from midstream.api.arguments import calling_place, check_name, check_uid
from midstream.core.config import is_whole
from midstream.core.errors import ConfigError, JobError, MidstreamError
from midstream.graph.logical import Input, LogicalGraph, Node
from midstream.operators.base import Operator
from midstream.operators.sink import Sink
from midstream.operators.source import Source

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", bound="Handle")

MakeOperator = Callable[[str], Operator]
"""From the operator's display name, which it puts into its messages."""


def located(call: Callable[P, T]) -> Callable[P, T]:
    """Errors of ours begin with the user's file and line; what the user's functions raise stays their cause."""

    @wraps(call)
    def placed(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except MidstreamError as error:
            place = calling_place()
            if not place or str(error).startswith(f"{place}: "):
                raise
            raise type(error)(f"{place}: {error}").with_traceback(error.__traceback__) from error.__cause__

    return placed


class Program:
    """What one Environment has been told so far."""

    def __init__(self) -> None:
        self.graph = LogicalGraph()
        self._makers: dict[int, MakeOperator] = {}

    def add_source(self, kind: str, source: Source) -> Node:
        return self.graph.add(kind, schema=source.schema, source=source, place=calling_place())

    def add(
        self,
        kind: str,
        inputs: Sequence[Input],
        make: MakeOperator,
        *,
        schema: Callable[[Operator], pa.Schema | None],
        sink: Sink | None = None,
        parallelism: int | None = None,
    ) -> tuple[Node, Operator]:
        """A new node and its operator. `make` raises what is wrong with the arguments."""
        operator = make(kind)
        node = self.graph.add(
            kind,
            inputs=inputs,
            operator=operator,
            schema=schema(operator),
            sink=sink,
            parallelism=parallelism,
            place=calling_place(),
        )
        self._makers[node.id] = make
        return node, operator

    def rename(self, node_id: int, name: str) -> None:
        node = self.graph.nodes[node_id]
        make = self._makers.get(node_id)
        self.graph.nodes[node_id] = dataclasses.replace(
            node, name=check_name(name, node.kind), operator=None if make is None else make(name)
        )

    def identify(self, node_id: int, uid: str) -> None:
        node = self.graph.nodes[node_id]
        check_uid(uid, node.label)
        self.graph.nodes[node_id] = dataclasses.replace(node, uid=uid)

    def widen(self, node_id: int, parallelism: int) -> None:
        node = self.graph.nodes[node_id]
        if not is_whole(parallelism, 1):
            raise ConfigError(f"{node.label}: parallelism {parallelism!r} is not a positive whole number")
        if node.kind == "window_all" and parallelism != 1:
            raise JobError(f"{node.label}: one window over all rows runs in one subtask; use key_by() for more")
        self.graph.nodes[node_id] = dataclasses.replace(node, parallelism=parallelism)


class Handle:
    """What an operator of the program can be told after it was made; each call answers the same object."""

    _program: Program
    _node: int | None
    """The operator that these calls are about; None where there is none: a union, a stream on its way to somewhere."""

    @located
    def uid(self: H, uid: str) -> H:
        """The operator's stable id. State is found by it when a changed program goes on from a checkpoint.

        Without one it is made of the operator's kind and how many of that kind the program wrote
        before it (`window-1`, `window-2` …): the same for as long as the program is.
        """
        self._program.identify(self._named("uid"), uid)
        return self

    @located
    def name(self: H, name: str) -> H:
        """What messages and displays call the operator."""
        self._program.rename(self._named("name"), name)
        return self

    @located
    def parallelism(self: H, parallelism: int) -> H:
        """How many subtasks the operator has; by default those of the environment."""
        self._program.widen(self._named("parallelism"), parallelism)
        return self

    def _named(self, method: str) -> int:
        if self._node is None:
            raise JobError(
                f"{method}() belongs directly behind an operator; a union, a side output, or a stream behind "
                "rebalance(), forward(), global_() or broadcast() is none"
            )
        return self._node
