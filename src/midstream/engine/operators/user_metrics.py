"""Counters and gauges of a user's function: `ctx.metrics.counter("calls").inc()`.

One `UserMetrics` per operator of a subtask. Heartbeats carry the values to the driver; they are not part of the state,
and start again with each attempt.
"""

from __future__ import annotations

import re
import sys
from numbers import Integral, Real
from typing import Any, Final

from midstream.engine.core.errors import JobError
from midstream.engine.core.python_values import kind_of

NAMES_MAX: Final = 100
"""The largest number of metrics of a function."""
NAME_CHARS_MAX: Final = 100
_NAME: Final = re.compile(rf"[A-Za-z][A-Za-z0-9_.]{{0,{NAME_CHARS_MAX - 1}}}", re.ASCII)
_MOST: Final = sys.float_info.max
"""Larger values cannot be sent, and neither can infinite ones."""


class Counter:
    """A counter, which only grows; `value` is its sum in this subtask since the attempt began.

    For example:

        def open(self, context):
            self.calls = context.metrics.counter("model_calls")
    """

    __slots__ = ("_name", "value")

    def __init__(self, name: str) -> None:
        self._name = name
        self.value: float = 0

    def inc(self, n: float = 1) -> None:
        """Add to the counter.

        `n`: a number of 0 or more.

        Raises JobError for a negative number, for anything that is not a number, and if the sum would be beyond the
        largest float.

            def process(self, row, ctx):
                ctx.metrics.counter("bytes").inc(len(row["body"]))
        """
        if type(n) is not int and type(n) is not float:
            n = _number(n, f"counter {self._name!r}")
        if not n >= 0:
            raise JobError(
                f"counter {self._name!r}: inc({n!r}): a counter only grows; use a gauge for values that can fall"
            )
        value = self.value + n
        if not value <= _MOST:
            raise JobError(f"counter {self._name!r}: inc({n!r}): the sum would be beyond the largest float")
        self.value = value


class Gauge:
    """A value that goes up and down; `value` is None until it is set.

    For example:

        def open(self, context):
            self.length = context.metrics.gauge("queue_length")
    """

    __slots__ = ("_name", "value")

    def __init__(self, name: str) -> None:
        self._name = name
        self.value: float | None = None

    def set(self, value: float) -> None:
        """Set the gauge.

        `value`: a finite number.

        Raises JobError for anything else.

            def process(self, row, ctx):
                ctx.metrics.gauge("queue_length").set(len(self.queue))
        """
        if type(value) is not int and type(value) is not float:
            value = _number(value, f"gauge {self._name!r}")
        if not -_MOST <= value <= _MOST:
            raise JobError(f"gauge {self._name!r}: set({value!r}): a gauge is a finite number")
        self.value = value


class UserMetrics:
    """The metrics of a function in one subtask, by name. The same name always returns the same object.

    They are in the job's status, on its page and in `/metrics`. They are no state: they start again with each attempt.

        >>> class Counted(KeyedProcessFunction):
        ...     def process(self, row, ctx):
        ...         ctx.metrics.counter("orders").inc()
        ...         ctx.metrics.gauge("last_price").set(row["price"])
        >>> counted = testing.harness(Counted(), orders.schema, {"user": str}, key="user")
        >>> _ = counted.process({"user": "ann", "price": 3})
        >>> counted.metrics
        {'orders': 1, 'last_price': 3}
    """

    __slots__ = ("_found",)

    def __init__(self) -> None:
        self._found: dict[str, Counter | Gauge] = {}

    def counter(self, name: str) -> Counter:
        """Return the counter of a name, which is created on first use.

        `name`: letters, digits, `_` and `.`, at most 100 characters, beginning with a letter. A function has at most
        100 metrics.

        Raises JobError for another name, for the name of a gauge, and for one metric too many.

            def process(self, row, ctx):
                ctx.metrics.counter("model_calls").inc()
        """
        found = self._found.get(name) if type(name) is str else None
        if type(found) is Counter:
            return found
        made = Counter(name)
        self._add(name, "counter", made)
        return made

    def gauge(self, name: str) -> Gauge:
        """Return the gauge of a name, which is created on first use.

        `name`: as for `counter`.

        Raises JobError for another name, for the name of a counter, and for one metric too many.

            def process(self, row, ctx):
                ctx.metrics.gauge("queue_length").set(len(self.queue))
        """
        found = self._found.get(name) if type(name) is str else None
        if type(found) is Gauge:
            return found
        made = Gauge(name)
        self._add(name, "gauge", made)
        return made

    def _add(self, name: Any, kind: str, made: Counter | Gauge) -> None:
        if type(name) is not str or not _NAME.fullmatch(name):
            raise JobError(
                f"metrics.{kind}({name!r}): a name consists of letters, digits, _ and ., begins with a letter, and has at "
                f"most {NAME_CHARS_MAX} characters"
            )
        if name in self._found:
            other = "gauge" if kind == "counter" else "counter"
            raise JobError(f"metrics.{kind}({name!r}): there is a {other} of that name; give one of them another name")
        if len(self._found) >= NAMES_MAX:
            some = ", ".join(map(repr, list(self._found)[-3:]))
            raise JobError(
                f"metrics.{kind}({name!r}): the function has {NAMES_MAX} metrics already, most recently {some}; a "
                "name must not depend on the data. Use metrics for a few kinds of things, and send values per key to "
                "a sink"
            )
        self._found[name] = made

    @property
    def counters(self) -> dict[str, float]:
        """The value of each counter, by name."""
        return {name: found.value for name, found in self._now() if type(found) is Counter}

    @property
    def gauges(self) -> dict[str, float]:
        """The value of each gauge that has been set, by name."""
        return {name: found.value for name, found in self._now() if type(found) is Gauge and found.value is not None}

    def _now(self) -> list[tuple[str, Counter | Gauge]]:
        return list(self._found.items())  # in one step: a committer adds others on its own thread


def _number(value: Any, where: str) -> float:
    """Convert a number, such as one of numpy's, to a Python number."""
    if isinstance(value, Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, Integral) else float(value)
    raise JobError(f"{where}: {value!r} is {kind_of(value)}, not a number; give an int or a float")
