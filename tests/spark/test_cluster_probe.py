"""What processes on the executors find, on a real Spark."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from machine import limit_s
from midstream.engine.core.errors import ClusterError
from midstream.runtime.network.ports import ANY_PORT, Ports, listen
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.process.slot_provider import SlotProvider
from midstream.runtime.storage.file_storage import FileStorage
from midstream.spark import cluster_probe as surveys
from midstream.spark.cluster_probe import PACKAGES, ClusterProbe, survey
from waiting import until_spark_is_idle

pytestmark = pytest.mark.spark
TOKEN = secrets.token_hex(32)


def look(
    spark: Any,
    slots: int,
    timeout_s: float = 60,
    storage: str | None = None,
    probe: str = "probe",
    provider: SlotProvider | None = None,
    certificates: str = "",
) -> ClusterProbe:
    provider = provider or ProcessSlots()  # whose addresses are those of slots on a local master
    return survey(spark.sparkContext, provider, slots, timeout_s, storage, probe, TOKEN, certificates)


def test_every_slot_says_what_it_is_and_reaches_all_others_and_the_storage(spark: Any, tmp_path: Path) -> None:
    FileStorage(str(tmp_path)).write("probe/driver", [TOKEN.encode()])
    found = look(spark, 4, storage=str(tmp_path))
    assert found.failure == "" and len(found.slots) == 4
    assert len({slot.found.pid for slot in found.slots}) == 4 and os.getpid() not in {s.found.pid for s in found.slots}
    for slot in found.slots:
        assert slot.tried is not None and slot.tried.unreachable == {} and slot.tried.storage == ""
        assert slot.found.packages.keys() == set(PACKAGES) and all(slot.found.packages.values())
        assert slot.asked_s - 1 <= slot.found.clock_s <= slot.answered_s + 1
    assert os.listdir(tmp_path / "probe") == ["driver"]
    until_spark_is_idle(spark)


@pytest.mark.turns(2)
def test_those_that_come_are_looked_at_when_there_are_too_few_cores_and_all_cores_are_free_again(spark: Any) -> None:
    found = look(spark, 5, timeout_s=limit_s(8))
    assert len(found.slots) == 4
    assert all(slot.tried is not None and not slot.tried.unreachable for slot in found.slots)
    until_spark_is_idle(spark)


def test_a_directory_that_is_another_one_there_is_noticed(spark: Any, tmp_path: Path) -> None:
    [slot] = look(spark, 1, storage=str(tmp_path / "elsewhere"), certificates=str(tmp_path)).slots
    assert slot.tried is not None and f"{tmp_path}/tls.crt does not exist on " in slot.tried.tls
    assert slot.tried is not None and "it is another directory, or not mounted here" in slot.tried.storage
    assert not (tmp_path / "elsewhere").exists()


class OnPorts(ProcessSlots):
    def __init__(self, driver: Ports, slots: Ports) -> None:
        super().__init__()
        self.driver_ports, self.slot_ports = driver, slots


def test_processes_listen_on_the_ports_on_which_slots_would(spark: Any) -> None:
    with listen("127.0.0.1") as taken:
        first = int(taken.getsockname()[1])
        ports = Ports(first, first + 9, "raise the setting")
        found = look(spark, 3, provider=OnPorts(ANY_PORT, ports))
        assert len(found.slots) == 3 and {slot.found.port for slot in found.slots} <= set(range(first + 1, first + 10))
        assert all(slot.tried is not None and not slot.tried.unreachable for slot in found.slots)
        none_left = look(spark, 1, provider=OnPorts(ANY_PORT, Ports(first, first, "raise the setting")))
        assert none_left.slots == ()
        assert none_left.failure == f"ClusterError: port {first} on 127.0.0.1 is in use: raise the setting"
        with pytest.raises(ClusterError, match=f"port {first} on 127.0.0.1 is in use: raise the setting"):
            look(spark, 1, provider=OnPorts(Ports(first, first, "raise the setting"), ANY_PORT))
    until_spark_is_idle(spark)


def test_a_driver_that_cannot_be_reached_is_why_none_come(spark: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
    ask = surveys._Request(address[0], address[1], TOKEN, None, "probe", ANY_PORT, "")
    failures: list[str] = []
    surveys._run(spark.sparkContext, "midstream-doctor-test", 1, ask, failures, threading.Event())
    assert len(failures) == 1 and "Connection refused" in failures[0]


def test_strangers_do_not_count() -> None:
    lines: list[surveys._ProbeConnection] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        strangers = []
        for said in (b"", b"\n", b"x" * 65 + b"\n", TOKEN.encode() + b"\nnot json\n", TOKEN.encode() + b"\n{}\n"):
            stranger = socket.create_connection(server.getsockname())
            stranger.sendall(said)
            stranger.shutdown(socket.SHUT_WR)
            strangers.append(stranger)
        surveys._gather(server, lines, 1, 2.0, TOKEN, threading.Event())
        for stranger in strangers:
            stranger.close()
    assert lines == []
