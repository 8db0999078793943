"""Kafka topics as a source: each partition is a split, whose offset is that of the next record.

A split is read by a consumer of its own, which is assigned its partition: there is no consumer group whose rebalances
could move partitions or offsets unnoticed. Offsets are in the job's checkpoints; they are committed to a group, for
monitoring its lag, only if the user names one, and are read from there only for a start that requests it.

Offsets have gaps where transactions were aborted or ended, and where topics are compacted; so nothing is counted by
them. The end of a partition that is read up to an offset is known when the broker reports that it has no more, since
the last offsets before it may have no record.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import datetime
from functools import partial
from typing import Any, Final, Literal, TypeAlias

import msgspec
import pyarrow as pa
from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition

from midstream.connectors.common.external_waits import ExternalWait
from midstream.connectors.common.malformed_records import (
    BadRecord,
    BadRecordsMax,
    OnBadRecord,
    check_on_bad_record,
    reported,
)
from midstream.connectors.files.text_parsers import CsvOptions
from midstream.connectors.kafka.broker_query import BrokerQuery
from midstream.connectors.kafka.client import (
    ANSWER_S,
    BrokerSilence,
    ClientConfig,
    OptionValue,
    convert_errors,
    convert_option_errors,
)
from midstream.connectors.kafka.cluster import EARLIEST, LATEST, KafkaCluster, PartitionId, Topic, are_two_topics
from midstream.connectors.kafka.consumer_options import OURS, new_consumer
from midstream.connectors.kafka.fetch_probe import new_fetcher
from midstream.connectors.kafka.fetched_records import Fetched, Report
from midstream.connectors.kafka.record_parser import KafkaFormat, RecordParser
from midstream.connectors.kafka.schema_registry import RegistrySilent
from midstream.connectors.kafka.shared_consumer import SharedConsumers
from midstream.connectors.kafka.source_bounds import (
    Start,
    Stop,
    Topics,
    checked_start,
    checked_topics,
    is_time,
    listed,
    topics_text,
)
from midstream.engine.core.config import Duration, interval_s
from midstream.engine.core.errors import ConfigError, StorageError
from midstream.engine.operators.bad_records import BadRecords
from midstream.engine.operators.source_api import (
    Discovery,
    DiscoveryContext,
    Source,
    Split,
    SplitReader,
    check_rate,
    decoded,
)

OnGap: TypeAlias = Literal["fail", "skip"]

_RECORDS_MAX: Final = 50_000
"""The largest number of records in one batch."""
_SIDE_BY_SIDE: Final = 100_000
"""Partitions never end, so a subtask reads all of its partitions together, and keeps a request open for each."""
_POLL_INTERVAL_S: Final = 5.0
"""The interval at which the broker of a silent partition is polled."""
_ANSWER_WAIT_S: Final = 0.5
"""The time for which a partition that is opened waits for its broker."""
_FIRST_S: Final = 5.0
"""The time for which the first discovery is repeated at once; later ones, and it too, come back after the interval."""
_FIRST_PAUSE_S: Final = 0.2
_CHECK_S: Final = 5.0
"""The time for which a reading thread waits for the id of its topic."""
_log = logging.getLogger(__name__)


class _Partition(msgspec.Struct, frozen=True, array_like=True):
    """The payload of a split. A split at offset 0 has not begun; it begins at `start`."""

    topic: str
    partition: int
    start: int
    stop: int | None
    """Records from this offset on are not read; None: without end."""
    from_earliest: bool
    """The split begins where the broker's records begin when it is opened; `start` is where that was."""
    topic_id: str
    """The id of the topic in which the offsets are."""


class _DiscoveryPosition(msgspec.Struct, frozen=True, array_like=True):
    """The position: the partitions of each topic that are splits already. `begun`: the first discovery has been done."""

    begun: bool = False
    topics: dict[str, Topic] = {}


class KafkaSource(Source):
    """Reads topics of a Kafka cluster (2.5 or later), from `start` to `stop` or indefinitely.

    A record without a value is a row of nulls. With the option `group.id`, offsets are committed after each checkpoint,
    for tools that show lag.

    The arguments are those of `Environment.read_kafka`.

    Raises ConfigError or SchemaError for invalid arguments at once, and for problems with the cluster when the job
    starts.

        source = KafkaSource("kafka-1:9092", "orders", schema=pa.schema({"user": pa.large_string()}), start="latest")
        env.source(source).uid("orders")
    """

    def __init__(  # noqa: PLR0913 - what users may choose
        self,
        servers: str | Sequence[str],
        topics: Topics,
        *,
        format: KafkaFormat = "json",
        schema: pa.Schema | str | None = None,
        csv: CsvOptions | None = None,
        registry: Mapping[str, OptionValue] | None = None,
        message: object = None,
        start: Start = "earliest",
        stop: Stop | None = None,
        metadata: Mapping[str, str] | Sequence[str] = (),
        on_gap: OnGap = "fail",
        on_bad_record: OnBadRecord = "fail",
        bad_records_max: BadRecordsMax | None = None,
        options: Mapping[str, OptionValue] | None = None,
        interval: Duration = "30 s",
        rows_per_s: float | None = None,
    ) -> None:
        self._topics = checked_topics(topics)
        self._where = f"KafkaSource of {topics_text(self._topics)}"
        self._connection = ClientConfig(servers, options, OURS, self._where)
        check_on_bad_record(on_bad_record, bad_records_max, self._where)
        self.drops_bad_records, self.bad_records_max = on_bad_record == "drop", bad_records_max
        one = self._topics[0] if isinstance(self._topics, tuple) and len(self._topics) == 1 else None
        self._parser = RecordParser(
            format,
            schema,
            metadata,
            self.drops_bad_records,
            self._where,
            csv=csv,
            registry=registry,
            subject=one and f"{one}-value",
            message=message,
        )
        self.schema = self._parser.schema
        if on_gap not in ("fail", "skip"):
            raise ConfigError(f"{self._where}: on_gap {on_gap!r} is not one of fail, skip")
        self._on_gap: OnGap = on_gap
        self._group = None if (group := self._connection.option("group.id")) is None else str(group)
        self._start = checked_start(start, self._topics, self._group, self._where)
        if not (stop is None or stop == "latest" or is_time(stop)):
            raise ConfigError(f"{self._where}: stop {stop!r} is not 'latest', a datetime with a time zone, or None")
        self._stop = stop
        self.bounded = stop is not None
        self.discovery_interval_s = interval_s(interval, "interval")
        check_rate(rows_per_s, self._where)
        self.rows_per_s = rows_per_s
        self._first: tuple[dict[str, Topic], list[_Partition]] | None = None
        """The result of the first discovery."""
        self._resumed_stops: dict[PartitionId, int] = {}
        """Where a job with `stop` ends that resumes from a checkpoint of a job without: partitions found before have no
        stop of their own. Determined once, on the driver, before the source goes to the slots; the splits of all later
        checkpoints have it.
        """
        self._its_cluster: KafkaCluster | None = None
        self._consumers = SharedConsumers()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_first": None, "_its_cluster": None}  # they are the driver's

    equal_shares = True
    continues_past_end = True

    def datasets(self) -> Sequence[str]:
        found = self._first[0] if self._first else ()  # of a pattern, the topics that were found first
        return self._connection.datasets(self._topics if isinstance(self._topics, tuple) else found)

    def splits_per_reader(self, parallelism: int) -> int:
        return _SIDE_BY_SIDE

    # ---- on the driver ----

    def prepare(self, uid: str, checkpoint_dir: str | None, restoring: bool) -> None:
        """Check brokers and topics. Raises StorageError if no broker answers, ConfigError for a topic that is missing
        or may not be read.
        """
        with convert_option_errors(self._where):
            new_consumer(self._connection, BrokerSilence(self._where, self._connection.servers).on_error).close()
        self._parser.check()
        found = self._cluster.topics(self._topics)
        if not found and self.bounded:
            raise ConfigError(
                f"{self._where}: no topic matches; a job with stop= reads the topics that exist when it starts"
            )
        if not restoring:
            self._check_start(found)
        elif self._stop is not None:
            self._resumed_stops = self._offsets(_partition_ids(found), self._stop)

    def _check_start(self, topics: Mapping[str, Topic]) -> None:
        """Raise ConfigError for an offset after the end of its partition. With `stop` nothing would be read, without a
        word; without it, the reader would report that records were lost.
        """
        if isinstance(self._start, Mapping):
            ((name, topic),) = topics.items()
            if set(self._start) != set(range(topic.partitions)):
                raise ConfigError(
                    f"{self._where}: start= has offsets for the partitions {listed(self._start)}, and topic {name!r} has "
                    f"{listed(range(topic.partitions))}; give one for each"
                )
        elif self._start != "group":
            return
        starts = self._offsets(_partition_ids(topics), self._start)
        leaves_nothing = isinstance(self._start, Mapping) and self._stop == "latest"
        # a group may have read further than the committed records reach, without read_committed
        ends = self._cluster.offsets([*starts], LATEST, committed=leaves_nothing)
        for (topic_name, partition), end in ends.items():
            start = starts[topic_name, partition]
            if start <= end:
                continue
            if self._start == "group":
                raise ConfigError(
                    f"{self._where}: group {self._group!r} has committed offset {start} of topic {topic_name!r}, "
                    f"partition {partition}, which ends before offset {end}: the topic was recreated, or brokers have "
                    "lost records. Reset the group's offsets, or give another start="
                )
            why = ", so stop='latest' leaves nothing to read" if leaves_nothing else ""
            raise ConfigError(
                f"{self._where}: start= has offset {start} for partition {partition}, whose "
                f"{'committed ' if leaves_nothing else ''}records end before offset {end}{why}; give one up to that"
            )

    def discover(self, position: bytes | None, context: DiscoveryContext) -> Discovery:
        known = _DiscoveryPosition() if position is None else decoded(position, _DiscoveryPosition, self._where)
        try:
            if known.begun:
                topics, found = self._newly_found(known.topics)
            else:
                # Remembered: a second query, after a restart, must give the same, and "latest" does not.
                topics, found = self._first = self._first or self._first_found_soon()
        except StorageError as error:
            # Readers wait for brokers that are gone, and so does this.
            _log.warning("%s: cannot discover partitions at present, and will try again: %s", self._where, error)
            return Discovery((), msgspec.msgpack.encode(known), exhausted=False)
        splits = tuple(
            Split(f"{part.topic}:{part.partition}", msgspec.msgpack.encode(part))
            for part in found
            if part.stop is None or part.start < part.stop
        )
        after = msgspec.msgpack.encode(_DiscoveryPosition(True, {**known.topics, **topics}))
        return Discovery(splits, after, exhausted=self.bounded)

    def checkpoint_completed(self, position: bytes | None, unfinished: Sequence[Split] | None = None) -> None:
        if self._group is None or unfinished is None or position is None:
            return
        offsets = {}
        if self._first and decoded(position, _DiscoveryPosition, self._where).begun:
            for part in self._first[1]:
                if part.stop is not None:
                    offsets[part.topic, part.partition] = max(part.start, part.stop)  # read to its end, if not below
        for split in unfinished:
            part = decoded(split.payload, _Partition, self._where)
            offsets[part.topic, part.partition] = split.offset or part.start
        if offsets:
            self._cluster.commit(self._group, offsets)

    def close(self) -> None:
        cluster, self._its_cluster = self._its_cluster, None
        if cluster is not None:
            cluster.close()

    @property
    def _cluster(self) -> KafkaCluster:
        if self._its_cluster is None:
            self._its_cluster = KafkaCluster(self._connection, self._where)
        return self._its_cluster

    def _first_found_soon(self) -> tuple[dict[str, Topic], list[_Partition]]:
        """Try again for a while: the partitions of a topic that was just created have leaders a moment later."""
        deadline_s = time.monotonic() + _FIRST_S
        while True:
            try:
                return self._first_found()
            except StorageError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(_FIRST_PAUSE_S)

    def _first_found(self) -> tuple[dict[str, Topic], list[_Partition]]:
        topics = self._cluster.topics(self._topics)
        partition_ids = _partition_ids(topics)
        starts = self._offsets(partition_ids, self._start)
        stops = dict.fromkeys(partition_ids) if self._stop is None else self._offsets(partition_ids, self._stop)
        is_earliest = self._start == "earliest"
        return topics, [_Partition(*at, starts[at], stops[at], is_earliest, topics[at[0]].id) for at in partition_ids]

    def _newly_found(self, known: Mapping[str, Topic]) -> tuple[dict[str, Topic], list[_Partition]]:
        """Return new topics and partitions, which are read from their beginning."""
        topics = self._cluster.topics(self._topics, may_be_gone=True)
        for name in known:  # to readers a topic that is gone may only appear silent
            is_read = self._topics.fullmatch(name) if isinstance(self._topics, re.Pattern) else name in self._topics
            if is_read and name not in topics:
                raise ConfigError(
                    f"{self._where}: topic {name!r} has disappeared since the job began to read it; restore it, or "
                    "start without it and with --fresh"
                )
        found = []
        for name, topic in topics.items():
            before = known.get(name, Topic(topic.id, 0))
            if are_two_topics(before.id, topic.id):
                raise self._recreated(name)
            for partition in range(before.partitions, topic.partitions):
                # a source that ends does not read what was created after the job had resumed
                stop = self._resumed_stops.get((name, partition), 0) if self.bounded else None
                found.append(_Partition(name, partition, 0, stop, True, topic.id))
        return topics, found

    def _recreated(self, topic: str) -> ConfigError:
        return ConfigError(
            f"{self._where}: topic {topic!r} was deleted and recreated since the job began to read it; it no "
            "longer has the records that were read before, so the job cannot resume: start with --fresh"
        )

    def _offsets(self, partition_ids: list[PartitionId], when: Start | Stop) -> dict[PartitionId, int]:
        if isinstance(when, Mapping):
            return {partition_id: when[partition_id[1]] for partition_id in partition_ids}
        if isinstance(when, datetime):
            return self._cluster.offsets(partition_ids, int(when.timestamp() * 1000))
        if when == "group":
            assert self._group is not None
            committed = self._cluster.committed(self._group, partition_ids)
            first = self._cluster.offsets(
                [partition_id for partition_id in partition_ids if partition_id not in committed], EARLIEST
            )
            return {**first, **committed}
        return self._cluster.offsets(partition_ids, EARLIEST if when == "earliest" else LATEST)

    # ---- on the subtasks ----

    def begin_split(self, split: Split) -> Split:
        if not self._resumed_stops:
            return split
        part = decoded(split.payload, _Partition, self._where)
        stop = self._resumed_stops.get((part.topic, part.partition)) if part.stop is None else part.stop
        bounded = msgspec.structs.replace(part, stop=stop)
        return msgspec.structs.replace(split, payload=msgspec.msgpack.encode(bounded))

    def open_split(self, split: Split) -> SplitReader:
        part = decoded(split.payload, _Partition, self._where)
        if part.stop is not None and not self.bounded:
            raise ConfigError(
                f"{self._where}: the checkpoint is of a job with stop=, which ends {_where(part)} at offset {part.stop} "
                "and has no more of the partitions that it has read to their end; resume it with stop=, or start a "
                "job without stop= with --fresh, and with start= for where it begins"
            )
        if part.stop is None and self.bounded:
            raise ConfigError(
                f"{self._where}: {_where(part)} was being read when the checkpoint was taken, and did not exist when "
                "the job resumed with stop=; restore the topic, or start without it and with --fresh"
            )
        return _KafkaPartitionReader(self, part, split.offset)

    def place(self, split: Split, first: int, last: int) -> str:
        part = decoded(split.payload, _Partition, self._where)
        return f"{_where(part)}, one of the records from offset {split.offset or part.start} on"


class _KafkaPartitionReader(SplitReader):
    def __init__(self, source: KafkaSource, part: _Partition, offset: int) -> None:
        self._source = source
        self._part = part
        self._where = _where(part)
        self._next = offset or part.start
        self._reports: list[Report] = []
        """Errors and events that came with the records of the last poll, or after them."""
        self._bad: list[BadRecord] = []
        """The bad records of the last poll."""
        self._kept: tuple[Fetched, int] | None = None
        """Records whose schema could not be looked up yet, and the offset at which they begin."""
        self._silence = BrokerSilence(self._where, source._connection.servers, what_for=f"of topic {part.topic!r}")
        self._registry_wait = ExternalWait()
        self._is_checked = part.from_earliest and not offset
        """The topic was found to be the one in which the offset is. Reading that begins where the broker's records begin
        does not depend on an offset.
        """
        self._check_again_s = 0.0
        self._wake: Callable[[], None] | None = None
        with ExitStack() as stack:
            with convert_option_errors(self._where):
                self._fetcher = new_fetcher(
                    source._consumers,
                    partial(new_consumer, source._connection),
                    part.topic,
                    part.partition,
                    source._parser.metadata,
                    self._silence.on_error,
                )
            stack.callback(self._fetcher.close)
            self._consumer = self._fetcher.consumer
            self._query = BrokerQuery(self._consumer, (part.topic, part.partition))
            self._assign(None if part.from_earliest and not offset else self._next)
            stack.pop_all()

    def on_rows(self, wake: Callable[[], None]) -> bool:
        if not self._fetcher.on_rows(wake):
            return False
        self._wake = wake
        return True

    def read(self, rows_max: int) -> tuple[pa.RecordBatch, int] | None:
        """Take the records that have arrived, without waiting.

        Raises SchemaError (bad records), ConfigError (a gap) and StorageError.
        """
        if self._kept is not None:
            return self._parsed(*self._kept)
        reports, self._reports = self._reports, []
        for report in reports:
            self._handle_report(*report)
        stop = self._part.stop
        if stop is not None and self._next >= stop and self._is_read_to_its_end():
            return None
        records_max = min(rows_max, _RECORDS_MAX)
        with convert_errors(self._where):
            records, self._reports = self._fetcher.take(records_max)
        if self._wake is not None and len(records) + len(self._reports) == records_max:
            self._wake()  # there may be more, also if fewer rows come of these records
        # the loss of a broker is not always reported; records may have come before, and after its return there may be none
        is_doubted = self._silence.is_doubted
        self._silence.polled(is_doubted and self._query.has_answered(time.monotonic(), _POLL_INTERVAL_S))
        if len(records) and not self._is_checked:
            self._check_topic()
        before = self._next
        if stop is not None and len(records) and records.offset(-1) >= stop:
            records.cut(stop)
            self._next = max(self._next, stop)
        if len(records):
            self._next = max(self._next, records.offset(-1) + 1)
        return self._parsed(records, before)

    def _parsed(self, records: Fetched, before: int) -> tuple[pa.RecordBatch, int]:
        """Return the rows of records that begin at offset `before`; none while the schema registry does not answer."""
        kept, self._kept = self._kept, None
        try:
            rows, self._bad = self._source._parser.rows(records, self._where)
        except RegistrySilent as error:
            if kept is None:
                _log.warning("%s: waiting at offset %d: %s", self._where, before, error)
            self._registry_wait.begin(f"the schema registry of topic {self._part.topic!r}")
            self._kept, self._bad = (records, before), []
            return self._source._parser.no_rows, before
        finally:
            if self._kept is None:
                records.close()
        if kept is not None:
            self._registry_wait.end()
            _log.warning("%s: the schema registry answers again; continuing", self._where)
        return rows, self._next

    def bad_records(self) -> BadRecords | None:
        return reported(self._bad)

    def close(self) -> None:
        self._silence.close()
        self._registry_wait.end()
        self._query.close()
        self._fetcher.close()

    def _is_read_to_its_end(self) -> bool:
        """Whether what was read up to `stop` is of one topic, as far as can be known; False: no broker answers at present.

        No later discovery compares the topics of a source that ends.
        """
        now_s = time.monotonic()
        if now_s < self._check_again_s:
            return False
        self._check_again_s = now_s + _POLL_INTERVAL_S
        try:
            self._check_topic(may_be_gone=True)
        except StorageError as error:
            _log.info(
                "%s: not taken as read to its end until brokers have reported the topic's id: %s", self._where, error
            )
            return False
        return True

    def _check_topic(self, *, may_be_gone: bool = False) -> None:
        """Raise ConfigError if the topic is not that in which the offsets are; StorageError without an answer.

        The client continues at the same offset of a topic that was recreated, and reports nothing, if the offset exists
        there. No topic gets the id of an earlier one: if it has not changed, all that was read before is of one topic.
        """
        part = self._part
        with closing(KafkaCluster(self._source._connection, self._where)) as cluster:
            found = cluster.topic_id(part.topic, _CHECK_S)
        if found is None and not may_be_gone:
            raise self._gone()
        if found is not None and are_two_topics(part.topic_id, found):
            raise self._source._recreated(part.topic)
        self._is_checked = True

    def _assign(self, offset: int | None) -> None:
        """None: wherever the broker's records begin.

        The broker is queried first. Without a response from it yet, librdkafka would wait 0.5 s before it requests that
        offset; and once it knows the topic, it does not report a partition that does not exist.
        """
        try:
            partition_id = TopicPartition(self._part.topic, self._part.partition)
            self._consumer.get_watermark_offsets(partition_id, timeout=_ANSWER_WAIT_S)
        except KafkaException as error:  # it is waited for
            if error.args[0].code() == KafkaError._UNKNOWN_PARTITION:
                self._silence.on_error(error.args[0])
        with convert_errors(self._where):
            self._fetcher.assign(OFFSET_BEGINNING if offset is None else offset)

    def _handle_report(self, error: KafkaError, offset: int | None) -> None:
        """Process a report of the broker other than records: the end for now, a gap, or a refusal."""
        match error.code():
            case KafkaError._PARTITION_EOF:
                assert offset is not None, "the end of a partition has an offset"
                self._next = max(self._next, offset)
            case KafkaError._AUTO_OFFSET_RESET | KafkaError.OFFSET_OUT_OF_RANGE:
                self._meet_gap()
            case KafkaError.UNKNOWN_TOPIC_OR_PART | KafkaError._UNKNOWN_TOPIC | KafkaError._UNKNOWN_PARTITION:
                raise self._gone()
            case KafkaError.TOPIC_AUTHORIZATION_FAILED:
                raise ConfigError(f"{self._where}: cannot be read: {error.str()}")
            case KafkaError.GROUP_AUTHORIZATION_FAILED:
                pass  # the client queries the group's coordinator, from which nothing is needed
            case _ if error.retriable() or error.code() in (
                KafkaError._TRANSPORT,
                KafkaError._ALL_BROKERS_DOWN,
                KafkaError._TIMED_OUT,
            ):
                self._silence.on_error(error)
            case _:
                raise StorageError(f"{self._where}: reading after offset {self._next} failed: {error.str()}")

    def _meet_gap(self) -> None:
        self._check_topic()
        at = TopicPartition(self._part.topic, self._part.partition)
        with convert_errors(f"{self._where}: cannot determine which offsets exist"):
            try:
                there = self._consumer.get_watermark_offsets(at, timeout=ANSWER_S)
            except KafkaException as error:
                if error.args[0].code() in (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION):
                    raise self._gone() from error
                raise
        if there is None:
            raise StorageError(f"{self._where}: no broker has reported which offsets exist")
        low, high = there
        has = f"the broker has {low} to {high - 1}" if high > low else f"the broker has none before {high}"
        if self._next > high:
            raise ConfigError(
                f"{self._where}: reading must resume at offset {self._next}, and {has}; the topic was recreated, or "
                "brokers have lost records. It no longer has the records that were read before: start with --fresh"
            )
        if self._next >= low:
            self._assign(self._next)  # it was there again, or always
            return
        if self._source._on_gap == "fail":
            raise ConfigError(
                f"{self._where}: reading must resume at offset {self._next}, and {has}: {low - self._next} offsets "
                "were "
                "deleted before they were read, by the topic's retention or by hand. on_gap='skip' continues without "
                "them"
            )
        _log.warning(
            "%s: offsets %d to %d no longer exist; continuing without them (on_gap)", self._where, self._next, low - 1
        )
        self._next = low
        self._assign(low)

    def _gone(self) -> ConfigError:
        return ConfigError(
            f"{self._where}: has disappeared since the job began to read it, at offset {self._next}; restore the "
            "topic, or start without it and with --fresh"
        )


def _partition_ids(topics: Mapping[str, Topic]) -> list[PartitionId]:
    return [(name, partition) for name, topic in topics.items() for partition in range(topic.partitions)]


def _where(part: _Partition) -> str:
    return f"topic {part.topic!r}, partition {part.partition}"
