"""The program under construction: the logical graph, how each operator is created, and where calls come from."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import ParamSpec, TypeVar

import pyarrow as pa

from midstream.api.argument_checks import calling_line, check_name, check_uid
from midstream.api.user_modules import JobFile, check_extra, collect
from midstream.engine.core.batches import canonical_schema
from midstream.engine.core.config import JobConfig, is_whole
from midstream.engine.core.errors import ConfigError, JobError, MidstreamError, SchemaError
from midstream.engine.core.schemas import check_schema
from midstream.engine.graph.logical_graph import Input, LogicalGraph, Node
from midstream.engine.operators.base import Operator
from midstream.engine.operators.sink_api import Sink
from midstream.engine.operators.source_api import Source
from midstream.engine.protocol.messages import JobModules

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H", bound="Handle")

MakeOperator = Callable[[str], Operator]
"""Creates an operator, given its display name, which it puts into its messages."""


def located(call: Callable[P, T]) -> Callable[P, T]:
    """Prefix midstream's errors with the user's file and line; an error of a user's function stays their cause."""

    @wraps(call)
    def placed(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return call(*args, **kwargs)
        except MidstreamError as error:
            line = calling_line()
            if not line or str(error).startswith(f"{line}: "):
                raise
            raise type(error)(f"{line}: {error}").with_traceback(error.__traceback__) from error.__cause__

    return placed


class Program:
    """The sources, operators and sinks that one Environment has been given so far, and what it was made with."""

    def __init__(self, config: JobConfig, file: JobFile, modules: tuple[str, ...]) -> None:
        self.config = config
        self.file = file
        self.modules = modules
        """Paths of modules that are shipped in addition to those that the job uses."""
        self.graph = LogicalGraph()
        self._makers: dict[int, MakeOperator] = {}

    def collected(self, pickled: bytes) -> JobModules:
        """The modules that slots need for the pickled graph; errors as of `collect`."""
        return collect(self.file, self.modules, pickled)

    def add_modules(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Add modules like `modules=` of the Environment. Raises ConfigError for a path that cannot be imported."""
        self.modules += check_extra(paths)

    def add_source(self, kind: str, source: Source) -> Node:
        own = type(source).__name__
        if not isinstance(source.schema, pa.Schema):
            raise SchemaError(f"{kind}: the schema of {own} is {source.schema!r}; it must be a pyarrow.Schema")
        check_schema(source.schema, kind)
        for field, canonical in zip(source.schema, canonical_schema(source.schema), strict=True):
            if field.type != canonical.type:
                raise SchemaError(
                    f"{kind}: column {field.name!r} of {own} is {field.type}; declare {canonical.type} in its schema, the form "
                    "in which rows of a job have such values"
                )
        return self.graph.add(Node(kind, schema=source.schema, source=source, location=calling_line()))

    def add(
        self,
        kind: str,
        inputs: Sequence[Input],
        make: MakeOperator,
        *,
        sink: Sink | None = None,
        parallelism: int | None = None,
    ) -> Node:
        """Add a node and return it. `make` raises an error for wrong arguments.

        The schema of its output is the attribute of that name, which all operators have; a sink has no output.
        """
        operator = make(kind)
        schema = getattr(operator, "schema", None) if sink is None else None
        assert sink is not None or isinstance(schema, pa.Schema), f"{type(operator).__name__} has no schema"
        if schema is not None:
            check_schema(schema, kind)
        for tag, side in getattr(operator, "side_outputs", {}).items():
            check_schema(side, f"{kind}: side output {tag!r}")
        node = self.graph.add(
            Node(
                kind,
                inputs=tuple(inputs),
                operator=operator,
                schema=schema,
                sink=sink,
                parallelism=parallelism,
                location=calling_line(),
            )
        )
        self._makers[node.id] = make
        return node

    def rename(self, node_id: int, name: str) -> None:
        node = self.graph.nodes[node_id]
        make = self._makers.get(node_id)
        self.graph.nodes[node_id] = dataclasses.replace(
            node, name=check_name(name, node.kind), operator=None if make is None else make(name)
        )

    def set_uid(self, node_id: int, uid: str) -> None:
        node = self.graph.nodes[node_id]
        check_uid(uid, node.label)
        self.graph.nodes[node_id] = dataclasses.replace(node, uid=uid)

    def set_parallelism(self, node_id: int, parallelism: int) -> None:
        node = self.graph.nodes[node_id]
        if not is_whole(parallelism, 1):
            raise ConfigError(f"{node.label}: parallelism {parallelism!r} is not a positive whole number")
        if node.kind == "window_all" and parallelism != 1:
            raise JobError(f"{node.label}: one window over all rows runs in one subtask; use key_by() for more")
        self.graph.nodes[node_id] = dataclasses.replace(node, parallelism=parallelism)


class Handle:
    """Settings of an operator of the program, made after it was added; each call returns the same object."""

    def __init__(self, program: Program, node: int | None) -> None:
        self._program = program
        self.node = (
            node  # the operator that these calls configure; None if there is none, as after a union or rebalance()
        )

    @located
    def uid(self: H, uid: str) -> H:
        """Set the operator's stable id, by which its state is found when a changed program resumes from a checkpoint.

        `uid`: up to 128 letters, digits, `_`, `.`, `:` or `-`. The default is made of the operator's kind and a count
        of these (`window-1`, `window-2` …); it changes if one of that kind is added before it.

        Returns the same object. Raises ConfigError for another uid, JobError if there is no operator directly before
        it, as after a union. A uid that occurs twice is refused when the job starts.

            >>> dear = orders.filter(pl.col("price") > 4).uid("dear")
            >>> list(testing.run(dear))
            ['dear (filter)']
        """
        self._program.set_uid(self._named("uid"), uid)
        return self

    @located
    def name(self: H, name: str) -> H:
        """Set the operator's name in messages and displays.

        `name`: a text that is not empty; by default the operator's kind.

        Returns the same object. Raises ConfigError for another name, JobError if there is no operator directly before
        it.

            >>> dear = orders.filter(pl.col("price") > 4).name("dear orders")
        """
        self._program.rename(self._named("name"), name)
        return self

    @located
    def parallelism(self: H, parallelism: int) -> H:
        """Set the operator's number of subtasks.

        `parallelism`: from 1 to the environment's `max_parallelism`; by default the environment's `parallelism`.

        Returns the same object. Raises ConfigError for a value that is not a positive whole number, JobError for
        windows over all rows, which have one subtask, and if there is no operator directly before it.

            >>> env = Environment("shop", parallelism=2)
            >>> _ = env.generate(lambda i: {"n": i}, count=9).map(lambda row: row).parallelism(4).print()
            >>> print(env.explain())
            3 vertices, 4 slots, at most 128 key groups
            [0] ×2  generate
            [1] ×4  map
                  ← [0] rebalance
            [2] ×2  print
                  ← [1] rebalance
        """
        self._program.set_parallelism(self._named("parallelism"), parallelism)
        return self

    def _named(self, method: str) -> int:
        if self.node is None:
            raise JobError(
                f"{method}() configures the operator that it is called on; a union, a side output, rebalance(), forward(), "
                f"global_() and broadcast() are not operators: call {method}() on the stream before"
            )
        return self.node
