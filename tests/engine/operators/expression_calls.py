"""Every function of the installed polars that makes an expression, with calls of it, and whether each is accepted.

The table is `expression_functions.json`: the function, then its calls by whether they are accepted. A call is Python
source over the columns of COLUMNS. After an upgrade of polars, `python tests/engine/operators/expression_calls.py` names the
functions that are new or gone and the calls that are accepted or refused otherwise than before, and writes the table
again; a new function needs a call, written into the table by hand.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import polars as pl
import polars.selectors as cs

from midstream.engine.operators.elementwise import faults_of

TABLE: Final = Path(__file__).with_name("expression_functions.json")
NAMESPACES: Final = ("str", "dt", "list", "arr", "struct", "cat", "bin", "name", "ext", "map")
COLUMNS: Final[dict[str, pl.DataType]] = {
    **{name: pl.Int64() for name in "ijm"},
    "p": pl.UInt32(),
    **{name: pl.Float64() for name in "fg"},
    **{name: pl.String() for name in "su"},
    "k": pl.Boolean(),
    **{name: pl.Datetime("us") for name in "tv"},
    "z": pl.Datetime("us", "Europe/Berlin"),
    "d": pl.Date(),
    "o": pl.Duration("us"),
    "h": pl.Time(),
    "l": pl.List(pl.Int64()),
    "w": pl.List(pl.String()),
    "q": pl.List(pl.Boolean()),
    "r": pl.Array(pl.Int64(), 2),
    "a": pl.Array(pl.String(), 2),
    "x": pl.Struct({"a": pl.Int64(), "b": pl.String()}),
    "y": pl.Binary(),
    "e": pl.Decimal(20, 2),
}
NAMES: Final[dict[str, Any]] = {
    "pl": pl,
    "cs": cs,
    "np": np,
    **{name: pl.col(name) for name in COLUMNS},
    "c": pl.col("s").cast(pl.Categorical),
    "n": pl.col("k").cast(pl.Int8).fill_null(0).cat.to(pl.Enum(["a", "b"])),
    "map_": pl.concat_list(pl.struct(key="s", value="i")).list.to_map(),
}


def expression_of(call: str) -> pl.Expr:
    made = eval(call, dict(NAMES))
    assert isinstance(made, pl.Expr), call
    return made


def reason_to_refuse(call: str) -> str | None:
    for _, fault in faults_of([expression_of(call)], columns_of(call)):
        return fault.reason
    return None


def columns_of(call: str) -> dict[str, pl.DataType]:
    meta = expression_of(call).meta
    names = COLUMNS if meta.has_multiple_outputs() else meta.root_names() or ["i"]
    return {name: COLUMNS[name] for name in COLUMNS if name in names}


def functions() -> set[str]:
    """Return the names of all functions of polars that make an expression, or a selector of columns."""
    return {*_methods(), *_of_module("pl", pl), *_of_module("cs", cs)}


def _methods() -> Iterator[str]:
    kinds = {"Expr": pl.Expr, **{name: type(getattr(pl.lit(1), name)) for name in NAMESPACES}}
    others = {
        name
        for name in dir(pl.Expr)
        if not name.startswith("_") and not inspect.isfunction(inspect.getattr_static(pl.Expr, name))
    }
    assert others == {*NAMESPACES, "meta", "deserialize"}, "polars has other namespaces"
    for prefix, kind in kinds.items():
        for name, function in inspect.getmembers(kind, callable):
            if not name.startswith("_") and inspect.isfunction(function):
                yield f"{prefix}.{name}"


def _of_module(prefix: str, module: Any) -> Iterator[str]:
    for name in module.__all__:
        function = getattr(module, name)
        if inspect.isfunction(function):
            returned = str(inspect.signature(function).return_annotation)
            if "Expr" in returned or "Selector" in returned or name == "when":
                yield f"{prefix}.{name}"


def read_table() -> dict[str, dict[str, list[str]]]:
    table: dict[str, dict[str, list[str]]] = json.loads(TABLE.read_text())
    return table


def main() -> None:
    table = read_table()
    found = functions()
    for name in sorted(found - table.keys()):
        print("new:", name)
    for name in sorted(table.keys() - found):
        print("gone:", name)
    made = {}
    for name in sorted(found):
        calls: dict[str, list[str]] = {"accepted": [], "refused": []}
        for verdict, listed in table.get(name, {}).items():
            for call in listed:
                now = "refused" if reason_to_refuse(call) else "accepted"
                calls[now].append(call)
                if now != verdict:
                    print(f"{verdict} before, {now} now:", call)
        made[name] = {verdict: listed for verdict, listed in calls.items() if listed}
    lines = [f"{json.dumps(name)}: {json.dumps(calls)}" for name, calls in made.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    sys.exit(main())
