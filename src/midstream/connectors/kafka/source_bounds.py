"""Which topics a Kafka source reads, from where and to where: the arguments, as users give them, and their checks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Literal, TypeAlias

from midstream.connectors.kafka.cluster import Names
from midstream.engine.core.config import is_whole
from midstream.engine.core.errors import ConfigError

Topics: TypeAlias = str | Sequence[str] | re.Pattern[str]
Start: TypeAlias = Literal["earliest", "latest", "group"] | datetime | Mapping[int, int]
Stop: TypeAlias = Literal["latest"] | datetime


def checked_topics(topics: Topics) -> Names:
    if isinstance(topics, re.Pattern):
        return topics
    names = (topics,) if isinstance(topics, str) else tuple(topics)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(f"KafkaSource: topics={topics!r} is neither a name, nor a list of them, nor re.compile(…)")
    if len(set(names)) < len(names):
        raise ConfigError(f"KafkaSource: topics={topics!r} names a topic twice")
    return names


def topics_text(topics: Names) -> str:
    return f"topics {topics.pattern!r}" if isinstance(topics, re.Pattern) else ", ".join(topics)


def checked_start(start: Start, topics: Names, group: object, where: str) -> Start:
    if isinstance(start, Mapping):
        if isinstance(topics, re.Pattern) or len(topics) != 1:
            raise ConfigError(
                f"{where}: start= with offsets is for a single topic; use a separate source for each topic"
            )
        if not start or not all(is_whole(key) and is_whole(value) for key, value in start.items()):
            raise ConfigError(f"{where}: start={start!r} is not a dict of partitions to offsets")
        return dict(start)
    if start == "group" and group is None:
        raise ConfigError(f"{where}: start='group' needs the group: options={{'group.id': …}}")
    if start not in ("earliest", "latest", "group") and not is_time(start):
        raise ConfigError(
            f"{where}: start {start!r} is not 'earliest', 'latest', 'group', a datetime with a time zone, or a dict of offsets"
        )
    return start


def is_time(value: object) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None


def listed(numbers: Mapping[int, int] | range) -> str:
    return ", ".join(map(str, sorted(numbers)))
