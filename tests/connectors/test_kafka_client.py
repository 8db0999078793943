"""What is said of brokers that are gone, and when."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from midstream.connectors.common.external_waits import ExternalWait, waits
from midstream.connectors.kafka.client import BrokerSilence
from midstream.engine.core.errors import StorageError

DOWN = KafkaError(KafkaError._ALL_BROKERS_DOWN)
ONE_DOWN = KafkaError(KafkaError._TRANSPORT, "10.0.0.1:9092 refuses connections")


class Listener:
    """A Silence, its clock, and what it has said since it was asked last."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self.now_s = 1000.0
        self.silence = BrokerSilence("topic 't', partition 0", "10.0.0.1:9092", lambda: self.now_s)
        self._caplog = caplog

    def after(self, seconds: float, *errors: KafkaError, heard: bool = False) -> list[str]:
        self.now_s += seconds
        for error in errors:
            self.silence.on_error(error)
        self.silence.polled(heard)
        said = [record.getMessage() for record in self._caplog.records]
        self._caplog.clear()
        return said


def test_a_silence_is_said_once_and_so_is_its_end(caplog):
    listener = Listener(caplog)
    assert listener.after(0, ONE_DOWN, DOWN) == []
    assert listener.after(4.9, DOWN) == []
    assert listener.after(0.1) == [
        "topic 't', partition 0: 10.0.0.1:9092 does not answer; waiting (10.0.0.1:9092 refuses connections)"
    ]
    assert listener.after(30, DOWN) == []
    assert listener.after(10, heard=True) == [
        "topic 't', partition 0: 10.0.0.1:9092 answers again after 45 s; continuing"
    ]
    assert listener.after(30) == []


def test_a_short_silence_and_one_broker_of_several_are_not_worth_a_word(caplog):
    listener = Listener(caplog)
    assert listener.after(0, DOWN) == []
    assert listener.after(3, heard=True) == []
    assert listener.after(60, ONE_DOWN, heard=True) == []
    assert listener.after(60) == []


def test_no_answer_after_one_connection_has_failed_is_a_silence_though_nobody_says_that_all_are_down(caplog):
    listener = Listener(caplog)
    assert not listener.silence.is_doubted
    assert listener.after(3600, ONE_DOWN) == [], "what came before is no part of it"
    assert listener.silence.is_doubted
    assert listener.after(4.9) == []
    assert len(listener.after(0.1)) == 1
    assert listener.after(10, heard=True) == [
        "topic 't', partition 0: 10.0.0.1:9092 answers again after 15 s; continuing"
    ]
    assert not listener.silence.is_doubted


def test_another_silence_is_said_again_though_there_were_no_records_in_between(caplog):
    listener = Listener(caplog)
    listener.after(0, DOWN)
    assert len(listener.after(5, DOWN)) == 1
    assert listener.after(3600, DOWN) == []
    assert len(listener.after(5)) == 1


def test_a_wait_ends_with_its_block_though_an_exception_keeps_the_frames_that_it_went_through():
    kept = []

    def fails_once() -> None:
        with ExternalWait() as wait:
            try:
                raise OSError("refused")
            except OSError as error:
                kept.append(error)
                wait.begin("brokers c:9092")

    fails_once()
    assert kept[0].__traceback__ is not None and "wait" in kept[0].__traceback__.tb_frame.f_locals
    assert not [what for what, _ in waits(0) if "c:9092" in what]


def test_what_a_silence_keeps_from_being_done_is_said_while_it_lasts():
    def said(now_s: float) -> list[tuple[str, int]]:
        """Of these brokers: what other tests of this process have left open ends with its garbage collection."""
        return [wait for wait in waits(now_s) if "b:9092" in wait[0]]

    now_s = 1000.0
    silences = [BrokerSilence("here", "b:9092", lambda: now_s, what_for="of topic 't'") for _ in range(3)]
    silences[0].on_error(DOWN)
    now_s += 2
    for silence in (*silences, BrokerSilence("on the driver", "b:9092", lambda: now_s)):
        silence.on_error(DOWN)
    now_s += 4
    assert said(now_s) == [("brokers b:9092 of topic 't'", 6000)]
    silences[0].polled(True)
    assert said(now_s) == [("brokers b:9092 of topic 't'", 4000)]
    silences[1].close()
    silences[1].on_error(DOWN)
    now_s += 90
    silences[2].on_error(DOWN)
    assert said(now_s) == [("brokers b:9092 of topic 't'", 0)], "it was another time"
    del silences, silence
    assert said(now_s) == []


def test_a_refusal_is_raised(caplog):
    with pytest.raises(StorageError, match=r"10\.0\.0\.1:9092 refuses the user: no such user"):
        Listener(caplog).after(0, KafkaError(KafkaError._AUTHENTICATION, "no such user"))
