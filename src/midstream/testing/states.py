"""The contents of the states of users' functions, for examination between two rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import polars as pl

from midstream.engine.core.errors import ConfigError
from midstream.engine.operators.base import Operator
from midstream.engine.operators.functions.batch_functions import BatchFunctionOperator
from midstream.engine.operators.functions.process_operator import ProcessOperator


def contents(operators: Sequence[Operator], name: str) -> dict[str, Any]:
    """Return the contents over all subtasks of one operator. Raises ConfigError for one without declared states."""
    found: dict[str, Any] = {}
    for operator in operators:
        if isinstance(operator, ProcessOperator):
            for state, entries in operator.contents().items():
                found.setdefault(state, {}).update(entries)
        elif isinstance(operator, BatchFunctionOperator):
            for state, frame in operator.contents().items():
                found[state] = frame if state not in found else pl.concat([found[state], frame])
        else:
            raise ConfigError(f"operator {name!r} has no states that a function declares ({type(operator).__name__})")
    return found
