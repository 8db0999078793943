"""The pickling of a graph by the simulated driver, for its slots."""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final

import pyarrow as pa

from midstream.engine.graph.job_graph import Edge, JobGraph, OperatorSpec, SourceSpec, Vertex
from midstream.engine.operators.windows.window_aggregation import WindowAggregation

CONSTANTS: Final = frozenset({Edge, WindowAggregation, pa.Schema})


class Pickler(pickle.Pickler):
    """Pickles fast, since every task gets a copy of the graph: constants are not copied, and the rest has short forms.

    The constants that it meets are added to `externals`.
    """

    def __init__(self, file: io.BytesIO, names: Mapping[int, str], externals: dict[str, object]) -> None:
        super().__init__(file, protocol=5)
        self._names = names
        self._externals = externals

    def persistent_id(self, item: Any) -> str | None:
        if type(item) in CONSTANTS:
            name = f"constant {len(self._externals)}"
            self._externals[name] = item
            return name
        return self._names.get(id(item))

    def reducer_override(self, item: Any) -> Any:
        if type(item) in (JobGraph, Vertex, OperatorSpec, SourceSpec):
            return type(item), tuple(getattr(item, entry.name) for entry in fields(item))
        return NotImplemented


class GraphUnpickler(pickle.Unpickler):
    """Reads what `Pickler` has made."""

    def __init__(self, data: bytes, externals: Mapping[str, object]) -> None:
        super().__init__(io.BytesIO(data))
        self._externals = externals

    def persistent_load(self, name: Any) -> Any:
        return self._externals[name]
