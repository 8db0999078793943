"""Whether a polars expression computes each row on its own: for a row alone, in any batch, next to any rows, in any process.

Decided by behaviour. Each part of an expression is evaluated on probe rows of the types of its operands: together, one
by one, in halves, in other orders and among other rows. Operands are probes too, not what the parts below compute, so
that a part cannot hide what it does in values that never reach it: `when(x == 12345).then(x.sum())` has the sum as a
part. What polars itself reports of a part only adds refusals.

Behaviour shows nothing of what a Python function does for other values than the probes; that remains the user's.
"""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Final

import msgspec
import polars as pl
import pyarrow as pa

from midstream.engine.core.errors import JobError, SchemaError
from midstream.engine.operators.expression_trees import (
    Tree,
    Trees,
    depth,
    nodes,
    read_expr,
    substitute,
    without_elements,
    without_fields,
    without_selectors,
)
from midstream.engine.operators.expressions import EXPRESSION_ERRORS, columns_read, empty_frame, is_plain_column
from midstream.engine.operators.probe_values import ROWS, map_leaves, probe
from midstream.engine.operators.row_differences import (
    OTHER_ROWS,
    USE_MAP,
    ExpressionFault,
    difference,
    missing_cast,
    outcome_of,
    probes_of,
)

_FORMAT: Final = "state the format, for example to_date('%Y-%m-%d')"
_CATEGORIES: Final = "use the text, or cast to pl.Enum and then .to_physical(): an Enum has the same numbers everywhere"
_RANDOM: Final = "use a function of the row's own columns, such as hash(), or map()"
_SORTED: Final = "leave it out: rows come in any order, and polars would compare wrongly"
_JSON: Final = "use map() with json.loads, or str.json_path_match()"
_BUILD: Final = "call the function with the type from the stream's schema when the job is defined"
_RETURNED: Final = "state return_dtype=, without which polars infers the type from a few results and changes the others"
_NO_TYPE: Final = b"PLPYFN\x94\xc0"
"""The first bytes of a Python function in a serialised expression: MessagePack of four fields, of which the type is nil."""
_ELEMENTS: Final = (
    "use .list.agg(pl.element().sum()), for arrays .arr.agg(), for a mean .mean(): where a list of the batch has a null, polars "
    "adds the floats of all lists in another order"
)
_ADDS_ELEMENTS: Final = re.compile(rb'"(ListExpr|ArrayExpr)":"(Sum|Mean)"')
_CONSTANT: Final = "use pl.lit() of one value, or reduce the series to one value with first(), sum() or the like"

_NUMBERS: Final = "depends on the numbers of categories, which follow from what a process has seen before"
_TEXTS: Final = [text for text in probe(pl.String(), close_together=False) if text is not None]

DEPTH_MAX: Final = 800
"""How many parts of an expression may lie within one another: a few hundred operations take a second to check."""
_RECURSION_LIMIT: Final = 6_000
_TOO_DEEP: Final = ExpressionFault(
    "has too many parts within one another to be checked",
    "compute it in several steps, each with with_columns(), or use a function such as sum_horizontal() or fold()",
    is_of_types=True,
)

_OUT: Final = "result"
_OF_COLUMN: Final = b'"OfExpr":'
"""In the type of a cast to that of an expression (polars' dtype_of)."""
_MAY_BE_LONG: Final = (b'"Range":', b'"RepeatBy"', b'"PadStart"', b'"PadEnd"', b'"ZFill"')
_REMEMBERED_BYTES: Final = 10_000
"""The length of an expression, as JSON, up to which what was found is remembered."""


class _Found(Exception):
    """Ends the search. `part` is the part with the fault, "it" for the whole expression."""

    def __init__(self, fault: ExpressionFault, part: str = "it") -> None:
        super().__init__(fault, part)
        self.fault = fault.of(part)


def check_row_by_row(exprs: Sequence[pl.Expr], schema: pa.Schema, where: str) -> None:
    """Raise JobError for an expression whose result for a row of `schema` depends on other rows or on the process.

    The engine decides where batches are cut and in which process a row is processed, so such a result would be arbitrary.
    Raises SchemaError for an expression with a cast that polars does not have, or a Python function of unknown type.
    """
    for expr in exprs:
        if not isinstance(expr, pl.Expr):
            raise JobError(f"{where}: {expr!r} is not a polars expression; write for example pl.col('x') + 1")
    exprs = [expr for expr in exprs if not is_plain_column(expr)]
    for expr, fault in faults_of(exprs, _kinds(exprs, schema, where)):
        raise _refusal(f"{where}: {expr}", "does not compute each row on its own", fault)


def check_of_many_rows(exprs: Sequence[pl.Expr], schema: pa.Schema, where: str) -> None:
    """Raise JobError for an expression whose result for rows of `schema` depends on more than these rows."""
    kinds = _kinds(exprs, schema, where)
    for expr in exprs:
        try:
            with _probing():
                _check_parts(expr, kinds, of_many_rows=True)
        except _Found as found:
            raise _refusal(f"{where}: {expr}", "depends on more than its rows", found.fault) from None


def _refusal(what: str, verdict: str, fault: ExpressionFault) -> JobError | SchemaError:
    if fault.is_of_types:
        return SchemaError(f"{what}: {fault.reason}; {fault.remedy}")
    return JobError(f"{what} {verdict}: {fault.reason}; {fault.remedy}")


def _kinds(exprs: Sequence[pl.Expr], schema: pa.Schema, where: str) -> pl.Schema:
    names = columns_read(exprs, schema) if exprs else []
    return empty_frame(pa.schema([schema.field(name) for name in names]), where).schema


def faults_of(exprs: Sequence[pl.Expr], schema: Mapping[str, pl.DataType]) -> list[tuple[pl.Expr, ExpressionFault]]:
    """Return the expressions over rows of `schema` that do not compute each row on its own, each with the reason.

    One that cannot be evaluated, since a column or a type does not fit, has no fault.
    """
    found: list[tuple[pl.Expr, ExpressionFault]] = []
    whole: list[pl.Expr] = []
    with _probing():
        for expr in exprs:
            try:
                if _check_parts(expr, schema):
                    whole.append(expr)
            except _Found as reason:
                found.append((expr, reason.fault))
        if whole and difference(whole, schema, " ".join(map(str, whole))) != ROWS:
            for expr in whole:
                fault = difference([expr], schema, str(expr))
                if isinstance(fault, ExpressionFault):
                    found.append((expr, fault.of("it")))
    return found


@contextmanager
def _probing() -> Iterator[None]:
    """Ignore the warnings of functions that are called with probes, and let deep expressions be visited."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _RECURSION_LIMIT))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.setrecursionlimit(limit)


def _check_parts(expr: pl.Expr, schema: Mapping[str, pl.DataType], *, of_many_rows: bool = False) -> bool:
    """Return whether the expression should be checked as a whole too. Raises _Found for a part with a fault."""
    trees = Trees()
    try:
        tree = trees.tree(expr)
        if depth(tree) > DEPTH_MAX:
            raise _Found(_TOO_DEEP)
        _check_names(tree)
        judged = 0
        for each in without_selectors(trees, tree, schema):
            parts = _Parts(trees, schema, of_many_rows=of_many_rows)
            parts.visit_whole(each)
            judged = max(judged, parts.judged)
    except _Found:
        raise
    except RecursionError:
        raise _Found(_TOO_DEEP) from None
    except EXPRESSION_ERRORS:  # it has a function that cannot be pickled, or another part that polars cannot write
        if not of_many_rows and _reported(expr) is False:
            raise _Found(ExpressionFault("may depend on other rows", OTHER_ROWS)) from None
        fault = _of_no_type(_kind_of(expr, pl.DataFrame(schema=schema)))
        if fault is not None:
            raise _Found(fault) from None
        for part in expr.meta.pop():
            if not _is_in_list(part):
                _check_parts(part, schema, of_many_rows=of_many_rows)
        return True
    if judged == 1 and not expr.meta.has_multiple_outputs():
        return False  # the part is the whole
    # Functions were called with probes already. Ranges may be as long as what is computed from probes is large.
    # A constant of a column's type was judged as if it were a column.
    text = trees.text(tree)
    if _OF_COLUMN in text:
        return True
    return not _has_function(text) and not any(each in text for each in _MAY_BE_LONG)


# ---- the parts of an expression ----


class _Parts:
    """Evaluates the parts of an expression on probes, those below first."""

    def __init__(self, trees: Trees, schema: Mapping[str, pl.DataType], *, of_many_rows: bool = False) -> None:
        self._trees = trees
        self._schema = schema
        self._whole: Tree = None
        self._of_many_rows = of_many_rows
        """Whether rows may depend on each other, as the elements of a list and the rows of an aggregate do."""
        self.judged = 0
        """How many parts have been evaluated."""

    def visit_whole(self, tree: Tree) -> None:
        while (inner := _named(tree)) is not None:
            tree = inner
        self._whole = tree
        self.visit(tree)

    def visit(self, tree: Tree) -> pl.DataType | None:
        """Return the type of the tree's values, None if it is unknown. Raises _Found for a part with a fault."""
        match tree:
            case {"Column": str(name)} if not self._trees.is_held_out(name):
                return self._schema.get(name)
            case {"Literal": {"Dyn": _} | {"Scalar": _}} if "Categorical" not in str(tree):
                return _kind_of(self._trees.expr(tree), pl.DataFrame())
            case _:  # what has parts is evaluated
                inner = _named(tree)
        if inner is not None:
            return self.visit(inner)
        if self._is_kept(tree):
            constant = self._trees.expr(tree)
            if _is_one_value(constant):
                return _kind_of(constant, pl.DataFrame())
            if tree is self._whole:
                raise _Found(ExpressionFault("is a series of values, not one value for each row", _CONSTANT))
        is_range = _is_function("Range", tree)  # from a constant to a probe it may be long
        computed = [child for child in self._operands(tree) if is_range or not self._is_kept(child)]
        operands = [(child, kind) for child in computed if (kind := self.visit(child)) is not None]
        return self._judge(tree, operands if len(operands) == len(computed) else [])

    def _operands(self, tree: Tree) -> list[Tree]:
        """Return the trees directly below that are computed for each row; visit those computed within a row."""
        children = self._trees.children(tree)
        match tree:
            case {"StructEval": {"expr": struct, "evaluation": list(fields)}}:
                for field in fields:
                    self.visit(without_fields(field, struct))
                return [child for child in children if child not in fields]
            case {"Eval": {"expr": lists, "evaluation": evaluation}}:
                if "Categorical" in str(tree):
                    kind = getattr(self.visit(lists), "inner", None)
                    elements = {} if kind is None else {"element": kind}
                    _Parts(self._trees, elements, of_many_rows=True).visit(without_elements(evaluation, "element"))
                return [lists]
            case _:  # all other parts read rows of the stream
                return children

    def _is_kept(self, child: Tree) -> bool:
        """Whether an operand is the same for all rows, so that it stays as it is."""
        match child:
            case {"Literal": {"Dyn": _} | {"Scalar": _}}:
                return "Categorical" not in str(child)
            case {"Column": str(name)} if not self._trees.is_held_out(name):
                return False
            case _:  # what has parts is evaluated
                text = self._trees.text(child)
        if any(each in text for each in (b'{"Column":', b'"Len"', b"Categorical")) or _has_function(text):
            return False
        return _is_constant(text)

    def _judge(self, tree: Tree, operands: Sequence[tuple[Tree, pl.DataType]]) -> pl.DataType | None:
        self.judged += 1
        kind, fault = self._judged(tree, operands)
        if fault is None and kind is None:  # it does not fit its operands, or not columns that stand in place of them
            kind = _kind_of(read_expr(self._trees.text(tree)), pl.DataFrame(schema=self._schema))
            if kind is not None:
                _, fault = self._judged(tree, [])
        if fault is not None:
            raise _Found(fault, "it" if tree is self._whole else str(self._trees.expr(tree)))
        return kind

    def _judged(
        self, tree: Tree, operands: Sequence[tuple[Tree, pl.DataType]]
    ) -> tuple[pl.DataType | None, ExpressionFault | None]:
        stand_ins = []
        for index, (child, _) in enumerate(operands):
            column: Tree = {"Column": f"operand {index}"}
            if _is_function("AsStruct", tree):  # its fields have the names of the operands
                column = {"Alias": [column, self._trees.expr(child).meta.output_name()]}
            stand_ins.append((child, column))
        stand_ins.sort(key=lambda pair: -len(msgspec.json.encode(pair[0])))  # one may be part of another
        text = self._trees.text(substitute(tree, stand_ins))
        kinds = {f"operand {index}": kind for index, (_, kind) in enumerate(operands)}
        for name in read_expr(text).meta.root_names():
            if name not in kinds and name in self._schema:
                kinds[name] = self._schema[name]
        judged = _judge if _has_function(text) or len(text) > _REMEMBERED_BYTES else _judge_once
        return judged(text, tuple(kinds.items()), self._of_many_rows)


def _is_function(name: str, tree: Tree) -> bool:
    match tree:
        case {"Function": {"function": str(called)}}:
            return called == name
        case {"Function": {"function": dict(called)}}:
            return name in called
        case _:  # it calls no function
            return False


def _named(tree: Tree) -> Tree:
    """Return the tree to which this one only gives a name, None if it does more."""
    match tree:
        case {"Alias": [inner, _]} | {"KeepName": inner} | {"RenameAlias": {"expr": inner}}:
            return inner
        case _:  # it renames nothing
            return None


def _judge(
    text: bytes, kinds: tuple[tuple[str, pl.DataType], ...], of_many_rows: bool
) -> tuple[pl.DataType | None, ExpressionFault | None]:
    """Return the type of an expression over operands of these types, and its fault."""
    expr = read_expr(text)
    expr = expr if expr.meta.has_multiple_outputs() else expr.alias(_OUT)
    probes = probes_of(dict(kinds), text.decode())
    kind = _kind_of(expr, probes)
    if _has_function(text) and (untyped := _of_no_type(kind, is_inferred=_is_inferred(text))) is not None:
        return kind, untyped
    if any(_has_categories(each) for _, each in kinds):
        fault = _by_category(expr, dict(kinds), kind)
        if fault is not None:
            return kind, fault
    if of_many_rows:
        return kind, missing_cast([expr], dict(kinds), text.decode())
    found = difference([expr], dict(kinds), text.decode())
    if isinstance(found, ExpressionFault):
        adds = found.remedy == OTHER_ROWS and _ADDS_ELEMENTS.search(text)
        return kind, replace(found, remedy=_ELEMENTS) if adds else found
    if _has_function(text):
        return kind, None
    reported = _reported(expr)
    if reported is False:
        return kind, ExpressionFault("may depend on other rows", OTHER_ROWS)
    if reported is None and not found and kind is not None and not expr.meta.has_multiple_outputs():
        return kind, ExpressionFault("fails for each probe row, so that nothing shows how it computes others", USE_MAP)
    return kind, None


_judge_once: Final = lru_cache(maxsize=4096)(_judge)


def _kind_of(expr: pl.Expr, probes: pl.DataFrame) -> pl.DataType | None:
    for rows in (probes.clear(), probes):
        try:
            return rows.select(expr).dtypes[0]
        except EXPRESSION_ERRORS:
            continue
    return None


def _of_no_type(kind: pl.DataType | None, *, is_inferred: bool = False) -> ExpressionFault | None:
    """Return a fault if a Python function has this type, which polars infers from its results if none is stated.

    Where it expects nulls, it makes all other values null; of a struct, it drops the fields that the first does not have.
    """
    if kind is None:
        return None
    is_vague = any(isinstance(each, pl.Null) for each in _leaves(kind)) or (is_inferred and _has_struct(kind))
    if not is_vague:
        return None
    return ExpressionFault(f"calls a Python function whose results have the type {kind}", _RETURNED, is_of_types=True)


def _is_inferred(text: bytes) -> bool:
    """Whether the expression is a call of a Python function without `return_dtype`."""
    node = json.loads(text)
    while "Alias" in node:
        node = node["Alias"][0]
    function = node.get("AnonymousFunction", {}).get("function", ())
    return bytes(function[: len(_NO_TYPE)]) == _NO_TYPE


def _has_struct(kind: pl.DataType) -> bool:
    if isinstance(kind, (pl.List, pl.Array)):
        return isinstance(kind.inner, pl.DataType) and _has_struct(kind.inner)
    return isinstance(kind, pl.Struct)


def _is_constant(text: bytes) -> bool:
    """Whether an expression has the same values, however many, for whatever rows."""
    expr = read_expr(text)
    if expr.meta.root_names() or expr.meta.has_multiple_outputs():
        return False
    frames = [pl.DataFrame({"": range(rows)}) for rows in (1, 3)]
    try:
        first, second = (frame.select(expr.alias(_OUT)) for frame in frames)
    except EXPRESSION_ERRORS:
        return False
    return first.equals(second)


def _is_one_value(constant: pl.Expr) -> bool:
    """Whether each row of any batch has the value of the constant."""
    try:
        frames = [pl.DataFrame({"": range(rows)}).with_columns(constant.alias(_OUT)) for rows in (0, 1, 3)]
    except EXPRESSION_ERRORS:
        return False
    return frames[2].get_column(_OUT).equals(frames[1].get_column(_OUT).gather([0, 0, 0]))


def _reported(expr: pl.Expr) -> bool | None:
    """Return what polars itself reports; None if it cannot."""
    if expr.meta.has_multiple_outputs():
        return None  # for fields of a struct it would panic, with a message on stderr
    try:
        return expr.meta.is_row_separable()
    except EXPRESSION_ERRORS:
        return None


def _has_function(text: bytes) -> bool:
    return b'{"AnonymousFunction":' in text or b'"callback":[' in text


# ---- what the names of functions show, where behaviour does not ----


def _check_names(tree: Tree) -> None:
    for node in nodes(tree):
        match node:
            case {"Random": _} | {"Sample": {"seed": None}} | {"Rank": {"options": {"method": "Random"}}}:
                fault = ExpressionFault("is random", _RANDOM)
            case {"SetSortedFlag": _}:
                fault = ExpressionFault("declares that the rows are sorted", _SORTED)
            case {"Strptime": [_, {"format": None}]}:
                fault = ExpressionFault("infers the format of texts from those in a batch", _FORMAT)
            case {"JsonDecode": _}:
                fault = ExpressionFault(
                    "parses the texts of a batch as one document, so that a bad one may shift others", _JSON
                )
            case {"Categorical": {"To": [kind, _]}} if "'Enum'" not in str(kind):
                fault = ExpressionFault(_NUMBERS, _CATEGORIES)
            case {"PipeWithDtype": _}:
                fault = ExpressionFault("is a function that returns an expression for each batch", _BUILD)
            case {"Eval": {"variant": {"Cumulative": _}}}:
                fault = ExpressionFault("depends on the rows before", OTHER_ROWS)
            case _:  # it is judged by its results
                continue
        raise _Found(fault)


def _is_in_list(part: pl.Expr) -> bool:
    """Whether this is what list.eval computes within one row."""
    return not part.meta.root_names() and "element()" in str(part)


# ---- categories, whose numbers depend on what a process has seen ----


def _by_category(expr: pl.Expr, kinds: Mapping[str, pl.DataType], kind: pl.DataType | None) -> ExpressionFault | None:
    """Return a fault if results depend on the numbers of categories, not only on their texts."""
    results = []
    for first in (_TEXTS, _TEXTS[::-1]):
        fresh = pl.Categorical(pl.Categories.random())
        numbered = pl.Series(first, dtype=fresh)  # numbers its categories in this order for as long as it lives
        probes = probes_of({name: _mapped(each, fresh) for name, each in kinds.items()}, str(expr))
        result = outcome_of([expr], probes)
        if isinstance(result, pl.DataFrame):
            made = result.select(pl.exclude(probes.columns))
            results.append(made.cast({name: _mapped(each, pl.String()) for name, each in made.schema.items()}))
        del numbered
    if len(results) == 2:
        return None if results[0].equals(results[1]) else ExpressionFault(_NUMBERS, _CATEGORIES)
    if kind is None or not any(each.is_numeric() for each in _leaves(kind)):
        return None  # it has a literal of the same categories; what comes out has texts
    return ExpressionFault(_NUMBERS, _CATEGORIES)


def _has_categories(kind: pl.DataType) -> bool:
    return any(isinstance(each, pl.Categorical) for each in _leaves(kind))


def _leaves(kind: pl.DataType) -> list[pl.DataType]:
    found: list[pl.DataType] = []

    def leaf(each: pl.DataType) -> pl.DataType:
        found.append(each)
        return each

    map_leaves(kind, leaf)
    return found


def _mapped(kind: pl.DataType, categorical: pl.DataType) -> pl.DataType:
    return map_leaves(kind, lambda leaf: categorical if isinstance(leaf, pl.Categorical) else leaf)
