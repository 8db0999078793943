"""Functions that travel by value."""

from __future__ import annotations

import functools
import pickle
import traceback

import pytest

from midstream.engine.core.job_pickle import pickled


def fails() -> None:
    inner = lambda: [1 / zero for zero in (0,)]  # noqa: E731 - code within code
    inner()


class Method:
    @functools.cached_property
    def value(self) -> float:
        return 1 / len(())


def shipped(thing: object) -> object:
    """As in another process, where this module is not."""
    import sys

    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    try:
        return pickle.loads(pickled(thing))
    finally:
        cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.mark.parametrize(("thing", "names"), [(fails, {"fails", "<lambda>"}), (lambda: Method().value, {"value"})])
def test_a_failure_of_a_function_that_has_travelled_names_its_file_and_lines(thing: object, names: set[str]) -> None:
    there = shipped(thing)
    assert there is not thing and callable(there)
    with pytest.raises(ZeroDivisionError) as raised:
        there()
    lines = {frame.name: frame.line for frame in traceback.extract_tb(raised.tb) if frame.filename == __file__}
    assert names <= lines.keys()
    assert all(lines[name] for name in names), "the line is found in the file"
