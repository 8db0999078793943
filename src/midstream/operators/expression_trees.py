"""Polars expressions as trees, in the JSON form that polars itself writes.

A tree is changed in ways in which an expression cannot: a part is replaced, a selector becomes a column. Which trees
lie directly below one is what polars says (`meta.pop`), so that new kinds of expressions need no change here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import msgspec
import polars as pl

Tree: TypeAlias = Any
"""A tree, or a part of one: what JSON has."""

_NOT_A_NUMBER: Final = {
    "BinaryExpr": {"left": {"Literal": {"Dyn": {"Float": 0.0}}}, "op": "TrueDivide", "right": {"Literal": {"Dyn": {"Float": 0.0}}}}
}
_HELD_OUT: Final = "midstream literal "


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
        return _read(self.text(tree))

    def text(self, tree: Tree) -> bytes:
        """Return the JSON of the tree, with all literals."""
        return msgspec.json.encode(_replaced(tree, self._whole))

    def children(self, tree: Tree) -> list[Tree]:
        """Return the trees directly below, in the order of its operands."""
        expr = _read(msgspec.json.encode(tree))
        return [msgspec.json.decode(child.meta.serialize(format="json")) for child in reversed(expr.meta.pop())]

    def is_held_out(self, name: str) -> bool:
        return name.startswith(_HELD_OUT)

    def _simpler(self, node: Tree) -> Tree:
        match node:
            case {"Literal": {"Series": _}}:
                self._held_out.append(node)
                return {"Column": f"{_HELD_OUT}{len(self._held_out) - 1}"}
            case {"Literal": {"Dyn": {"Float": None}} | {"Scalar": {"Float64": None}}}:  # JSON has no NaN and no infinity
                return _NOT_A_NUMBER
        return node

    def _whole(self, node: Tree) -> Tree:
        match node:
            case {"Column": str(name)} if self.is_held_out(name):
                return self._held_out[int(name.removeprefix(_HELD_OUT))]
        return node


def read_expr(text: bytes) -> pl.Expr:
    """Return the expression of which this is the JSON."""
    return _read(text)


def _read(text: bytes) -> pl.Expr:
    return pl.Expr.deserialize(io.BytesIO(text), format="json")


def substitute(tree: Tree, replacements: list[tuple[Tree, Tree]]) -> Tree:
    """Return the tree with each first part of a pair, wherever it occurs, replaced by the second."""

    def replacement(node: Tree) -> Tree:
        for old, new in replacements:
            if node == old:
                return new
        return node

    return _replaced(tree, replacement)


def nodes(tree: Tree) -> Iterator[Tree]:
    """Yield every dict in the tree, the outer before the inner."""
    if isinstance(tree, dict):
        yield tree
        for value in tree.values():
            yield from nodes(value)
    elif isinstance(tree, list) and tree and not isinstance(tree[0], int):
        for value in tree:
            yield from nodes(value)


def without_fields(tree: Tree, struct: Tree) -> Tree:
    """Return an expression of `struct.with_fields` as one of the struct: pl.field("x") becomes its field x."""

    def field(node: Tree) -> Tree:
        match node:
            case {"Field": [str(name)]}:
                return {"Function": {"input": [struct], "function": {"StructExpr": {"FieldByName": name}}}}
            case {"StructEval": {"expr": inner, **rest}}:
                return _Done({"StructEval": {"expr": _replaced(inner, field), **rest}})
        return node

    return _replaced(tree, field)


def without_elements(tree: Tree, name: str) -> Tree:
    """Return an expression of `list.eval` as one of the column `name`."""

    def element(node: Tree) -> Tree:
        match node:
            case "Element" | {"Column": ""}:
                return {"Column": name}
            case {"Eval": {"expr": inner, **rest}}:
                return _Done({"Eval": {"expr": _replaced(inner, element), **rest}})
        return node

    return _replaced(tree, element)


def without_selectors(trees: Trees, tree: Tree, schema: Mapping[str, pl.DataType]) -> list[Tree]:
    """Return the tree once per type of the columns that its selectors select, with a column of the type instead."""
    selectors = [node for node in nodes(tree) if node.keys() == {"Selector"}]
    if not selectors:
        return [tree]
    frame = pl.DataFrame(schema=schema)
    selected = [(each, frame.select(trees.expr(each)).schema) for each in selectors]
    tree = _replaced(tree, lambda node: _with_all_inputs(trees, node, selected, frame))
    by_type = [(each, list({kind: {"Column": name} for name, kind in columns.items()}.values())) for each, columns in selected]
    if any(not columns for _, columns in by_type):
        return []
    count = max(len(columns) for _, columns in by_type)
    return [
        substitute(tree, [(each, columns[index % len(columns)]) for each, columns in by_type]) for index in range(count)
    ]


def _with_all_inputs(
    trees: Trees, node: Tree, selected: list[tuple[Tree, pl.Schema]], frame: pl.DataFrame
) -> Tree:
    """Return a function that makes one column of all that a selector selects, such as pl.struct, with these columns."""
    match node:
        case {"Function": {"input": list(inputs), **rest}} if any(each in inputs for each, _ in selected):
            inner = {"Function": {"input": [each if _is_selector(each) else each for each in inputs], **rest}}
            try:
                if frame.lazy().select(trees.expr(inner)).collect_schema().len() > 1:
                    return node
            except pl.exceptions.PolarsError:
                return node
            columns = {msgspec.json.encode(each): [{"Column": name} for name in made] for each, made in selected}
            made = [new for each in inputs for new in (columns[msgspec.json.encode(each)] if _is_selector(each) else [each])]
            return {"Function": {"input": made, **rest}}
    return node


def _is_selector(node: Tree) -> bool:
    return isinstance(node, dict) and node.keys() == {"Selector"}


class _Done:
    """A part in which nothing more is replaced."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree


def _replaced(tree: Tree, replacement: Callable[[Tree], Tree]) -> Tree:
    """Return the tree with every part replaced, the outer before the inner; what was replaced is not replaced again."""
    made = replacement(tree)
    if isinstance(made, _Done):
        return made.tree
    if made is not tree:
        return made
    if isinstance(tree, dict):
        return {key: _replaced(value, replacement) for key, value in tree.items()}
    if isinstance(tree, list) and tree and not isinstance(tree[0], int):  # numbers are the bytes of a function
        return [_replaced(value, replacement) for value in tree]
    return tree
