"""The time to live of entries of keyed state: how it is declared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from midstream.engine.core.config import Duration, duration_us
from midstream.engine.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StateTtl:
    """How long the entries of a state live, for `ttl=` of a state; `ttl="7 d"` is `ttl=StateTtl("7 d")`.

    `duration`: an entry has expired once it was last written this long ago.
    `on`: "write", or "read": an entry that was read lives as long again, too.
    `by`: "event_time", in which case the stream must have it, or "clock": the clock of the slots.

    Raises ConfigError for what is none of these, and for 0.

        >>> class Seen(KeyedProcessFunction):
        ...     seen = ValueState(bool, default=False, ttl=StateTtl("1 h", on="read", by="clock"))
        ...     def process(self, row, ctx):
        ...         if not self.seen.value:
        ...             self.seen.value = True
        ...             return row
        >>> seen = testing.harness(Seen(), orders.schema, orders.schema, key="user")
        >>> seen.process([{"user": "ann", "price": 3}, {"user": "ann", "price": 4}])
        [{'user': 'ann', 'price': 3}]
    """

    duration: Duration
    on: Literal["write", "read"] = "write"
    by: Literal["event_time", "clock"] = "event_time"

    def __post_init__(self) -> None:
        if not duration_us(self.duration, "ttl"):
            raise ConfigError(f"ttl: {self.duration!r}: no entry would live; give a time such as '7 d'")
        for name, value, allowed in (
            ("on", self.on, ("write", "read")),
            ("by", self.by, ("event_time", "clock")),
        ):
            if value not in allowed:
                raise ConfigError(f"StateTtl: {name}={value!r}; it is {' or '.join(map(repr, allowed))}")

    @property
    def duration_us(self) -> int:
        """The duration in microseconds."""
        return duration_us(self.duration, "ttl")


def ttl_of(value: StateTtl | Duration | None) -> StateTtl | None:
    """Return what `ttl=` of a state stands for. Raises ConfigError for what is not a time to live."""
    return value if value is None or isinstance(value, StateTtl) else StateTtl(value)
