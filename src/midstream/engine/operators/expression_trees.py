"""Polars expressions as trees, in the JSON form that polars itself writes.

A tree is changed in ways in which an expression cannot: a part is replaced, a selector becomes a column. Which trees
lie directly below one is read from polars (`meta.pop`), so that new kinds of expressions need no change here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeAlias

import msgspec
import polars as pl

Tree: TypeAlias = Any
"""A tree, or a part of one: what JSON has."""

_NOT_A_NUMBER: Final = {
    "BinaryExpr": {
        "left": {"Literal": {"Dyn": {"Float": 0.0}}},
        "op": "TrueDivide",
        "right": {"Literal": {"Dyn": {"Float": 0.0}}},
    }
}
_HELD_OUT: Final = "\0literal "
_CUT_OFF: Final = "\0part "
"""The names of columns that stand in place of parts begin with these; no column of a stream has a NUL in its name."""
_READ_DEPTH: Final = 60
"""The depth at which trees are cut off to be read: polars reads at most 128 levels of JSON, two or three for a part."""


class Trees:
    """Converts expressions to trees and back.

    Literal series, which may be large, are held out of the trees: a column stands in place of each.
    """

    def __init__(self) -> None:
        self._held_out: list[Tree] = []

    def tree(self, expr: pl.Expr) -> Tree:
        """Return the tree. Raises an error of polars for an expression that it cannot write, such as one with a lock."""
        return _replaced(msgspec.json.decode(expr.meta.serialize(format="json")), self._simpler)

    def expr(self, tree: Tree) -> pl.Expr:
        """Return the expression, for its name and its text; a column stands in place of what is far below."""
        return read_expr(msgspec.json.encode(_cut(_replaced(tree, self._complete), _READ_DEPTH, [])))

    def text(self, tree: Tree) -> bytes:
        """Return the JSON of the tree, with all literals."""
        return msgspec.json.encode(_replaced(tree, self._complete) if self._held_out else tree)

    def children(self, tree: Tree) -> list[Tree]:
        """Return the trees directly below, in the order of the operands."""
        cut_off: list[Tree] = []
        expr = read_expr(msgspec.json.encode(_cut(tree, _READ_DEPTH, cut_off)))
        children = [msgspec.json.decode(child.meta.serialize(format="json")) for child in reversed(expr.meta.pop())]
        if not cut_off:
            return children
        return [_replaced(child, lambda node: _in_place(node, _CUT_OFF, cut_off)) for child in children]

    def is_held_out(self, name: str) -> bool:
        return name.startswith(_HELD_OUT)

    def _simpler(self, node: Tree) -> Tree:
        match node:
            case {"Literal": {"Series": _}}:
                self._held_out.append(node)
                return {"Column": f"{_HELD_OUT}{len(self._held_out) - 1}"}
            case {"Literal": {"Dyn": {"Float": None}} | {"Scalar": {"Float64": None} | {"Float32": None}}}:
                return _NOT_A_NUMBER  # JSON has no NaN and no infinity
            case _:  # all other parts can be written as they are
                return node

    def _complete(self, node: Tree) -> Tree:
        return _in_place(node, _HELD_OUT, self._held_out)


def read_expr(text: bytes) -> pl.Expr:
    """Return the expression of which this is the JSON."""
    return pl.Expr.deserialize(io.BytesIO(text), format="json")


def substitute(tree: Tree, replacements: Sequence[tuple[Tree, Tree]]) -> Tree:
    """Return the tree with each first part of a pair, wherever it occurs, replaced by the second."""
    return _replaced(tree, lambda node: next((new for old, new in replacements if node == old), node))


def depth(tree: Tree) -> int:
    """Return how many dicts of the tree lie within one another at most."""
    deepest, pending = 0, [(tree, 0)]
    while pending:
        node, level = pending.pop()
        if isinstance(node, dict):
            deepest = max(deepest, level + 1)
            pending.extend((each, level + 1) for each in node.values())
        elif isinstance(node, list):
            pending.extend((each, level) for each in node)
    return deepest


def nodes(tree: Tree) -> Iterator[Tree]:
    """Yield every dict in the tree, the outer before the inner."""
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            yield node
            pending += node.values()
        elif isinstance(node, list) and not _is_bytes(node):
            pending += node


def without_fields(tree: Tree, struct: Tree) -> Tree:
    """Return an expression of `struct.with_fields` as one of the struct: pl.field("x") becomes its field x."""

    def field(node: Tree) -> Tree:
        match node:
            case {"Field": [str(name)]}:
                return {"Function": {"input": [struct], "function": {"StructExpr": {"FieldByName": name}}}}
            case {"StructEval": {"expr": inner, **rest}}:  # the rest has fields of `inner`
                return {"StructEval": {"expr": _replaced(inner, field), **rest}}
            case _:  # all other parts read no field
                return node

    return _replaced(tree, field)


def without_elements(tree: Tree, name: str) -> Tree:
    """Return an expression of `list.eval` as one of the column `name`."""

    def element(node: Tree) -> Tree:
        match node:
            case "Element" | {"Column": ""}:
                return {"Column": name}
            case {"Eval": {"expr": inner, **rest}}:  # the rest has elements of `inner`
                return {"Eval": {"expr": _replaced(inner, element), **rest}}
            case _:  # all other parts read no element
                return node

    return _replaced(tree, element)


def without_selectors(trees: Trees, tree: Tree, schema: Mapping[str, pl.DataType]) -> list[Tree]:
    """Return the tree once per type of the columns that its selectors select, with a column of the type instead."""
    selectors = [node for node in nodes(tree) if _is_selector(node)]
    if not selectors:
        return [tree]  # before the frame: of a schema of 1,000s of columns, it takes longer than all else
    frame = pl.DataFrame(schema=schema)
    selected = {msgspec.json.encode(node): frame.select(trees.expr(node)).schema for node in selectors}

    def columns(node: Tree) -> list[Tree]:
        return [{"Column": name} for name in selected[msgspec.json.encode(node)]] if _is_selector(node) else [node]

    def with_all(node: Tree) -> Tree:
        """A function that makes one column of all that are selected, such as pl.struct, gets all."""
        match node:
            case {"Function": {"input": list(inputs), **rest}} if any(map(_is_selector, inputs)):
                try:
                    width = len(frame.lazy().select(trees.expr(node)).collect_schema())
                except pl.exceptions.PolarsError:
                    return node
                if width == 1:
                    every = [column for each in inputs for column in columns(each)]
                    return {"Function": {"input": [_replaced(each, with_all) for each in every], **rest}}
            case _:  # all other parts take the columns that they name
                pass
        return node

    tree = _replaced(tree, with_all)
    by_type = {
        text: list({kind: {"Column": name} for name, kind in kinds.items()}.values())
        for text, kinds in selected.items()
    }
    if not all(by_type.values()):
        return []
    return [
        substitute(tree, [(msgspec.json.decode(text), of[index % len(of)]) for text, of in by_type.items()])
        for index in range(max(map(len, by_type.values())))
    ]


def _is_selector(node: Tree) -> bool:
    return isinstance(node, dict) and node.keys() == {"Selector"}


def _is_bytes(node: list[Tree]) -> bool:
    """Whether a list has the bytes of a function or a series, of which there may be many."""
    return bool(node) and isinstance(node[0], int)


def _in_place(node: Tree, prefix: str, originals: Sequence[Tree]) -> Tree:
    """Return the original of which this column stands in place, or the node itself."""
    match node:
        case {"Column": str(name)} if name.startswith(prefix):
            return originals[int(name.removeprefix(prefix))]
        case _:  # all other parts were not held out
            return node


def _cut(tree: Tree, depth: int, cut_off: list[Tree]) -> Tree:
    """Return the tree with a column in place of each operation below a depth; these are appended to `cut_off`."""
    match tree:
        case {"BinaryExpr": _} | {"Ternary": _} | {"Cast": {"expr": _}} | {"Function": {"input": _}} if depth <= 0:
            cut_off.append(tree)
            return {"Column": f"{_CUT_OFF}{len(cut_off) - 1}"}
        case dict():
            return {key: _cut(value, depth - 1, cut_off) for key, value in tree.items()}
        case list() if not _is_bytes(tree):
            return [_cut(value, depth - 1, cut_off) for value in tree]
        case _:  # texts and numbers have no parts
            return tree


def _replaced(tree: Tree, replacement: Callable[[Tree], Tree]) -> Tree:
    """Return the tree with every part replaced, the outer before the inner; what was replaced is not replaced again."""
    made = replacement(tree)
    if made is not tree:
        return made
    if isinstance(tree, dict):
        return {key: _replaced(value, replacement) for key, value in tree.items()}
    if isinstance(tree, list) and not _is_bytes(tree):
        return [_replaced(value, replacement) for value in tree]
    return tree
