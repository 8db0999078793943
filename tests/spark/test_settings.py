"""What of Spark's settings and sessions a job cannot run with, said before a slot is asked for; no JVM."""

from __future__ import annotations

import os
from typing import Any

import pytest
from pyspark import SparkConf, SparkContext
from pyspark.sql import SparkSession

from midstream.engine.core.errors import ClusterError, ConfigError
from midstream.runtime.network.ports import ANY_PORT, Ports
from midstream.spark import session as sessions
from midstream.spark.dataframe import DataFrameSource
from midstream.spark.session import active_session, cores_to_take, get_session
from midstream.spark.spark_slots import SparkSlots, check_driver_host, check_settings


def conf(**settings: str) -> SparkConf:
    made = SparkConf(loadDefaults=False, _jvm=None)
    return made.setAll([(f"spark.{name.replace('__', '.')}", value) for name, value in settings.items()])


IDLE = {"python__worker__idleTimeoutSeconds": "30s", "python__worker__killOnIdleTimeout": "true"}
COPIES = {"speculation": "true", "speculation__task__duration__threshold": "1h"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            IDLE,
            (
                r"^spark.python.worker.idleTimeoutSeconds=30s together with spark.python.worker.killOnIdleTimeout=true makes "
                r"Spark kill every slot .*; leave out spark.python.worker.killOnIdleTimeout, or set it to false$"
            ),
        ),
        (
            COPIES,
            (
                r"^spark.speculation=true together with spark.speculation.task.duration.threshold=1h makes .* kill one of the "
                r"two; leave out spark.speculation.task.duration.threshold, or set spark.speculation to false$"
            ),
        ),
    ],
)
def test_settings_with_which_spark_ends_slots_are_refused_with_the_way_out(
    settings: dict[str, str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(conf(**settings))

    class Context:
        master = "local[2]"
        getConf = staticmethod(lambda: conf(**settings))

    class Session:
        sparkContext = Context

    with pytest.raises(ConfigError, match=message):
        SparkSlots(Session)  # type: ignore[arg-type]


@pytest.mark.parametrize("left_out", [*IDLE, *COPIES])
def test_one_of_them_alone_does_no_harm(left_out: str) -> None:
    both = IDLE if left_out in IDLE else COPIES
    check_settings(conf(**{name: value for name, value in both.items() if name != left_out}))


@pytest.mark.parametrize("off", ["0", "0s", "", " 0 "])
def test_no_idle_timeout_kills_nothing(off: str) -> None:
    check_settings(conf(**{**IDLE, "python__worker__idleTimeoutSeconds": off}))


def test_a_job_takes_as_many_cores_of_a_standalone_cluster_as_it_needs() -> None:
    assert cores_to_take(3, "spark://a:7077", conf()) == {"spark.cores.max": "3"}
    assert cores_to_take(3, "spark://a:7077", conf(task__cpus="2")) == {"spark.cores.max": "6"}
    assert cores_to_take(3, None, conf(master="spark://a:7077")) == {"spark.cores.max": "3"}


@pytest.mark.parametrize("master", ["yarn", "k8s://https://a:6443"])
def test_a_job_takes_as_many_executors_as_it_needs_where_spark_would_take_two(master: str) -> None:
    assert cores_to_take(3, master, conf()) == cores_to_take(3, None, conf(master=master)) == executors(3)
    assert cores_to_take(3, master, conf(executor__cores="2")) == executors(2)
    assert cores_to_take(3, master, conf(executor__cores="5", task__cpus="2")) == executors(2)
    assert cores_to_take(3, master, conf(executor__instances="1")) == {}
    assert cores_to_take(3, master, conf(dynamicAllocation__enabled="true")) == {}


def executors(count: int) -> dict[str, str]:
    return {"spark.executor.instances": str(count)}


@pytest.mark.parametrize("master", ["local[4]", "local-cluster[2,2,1024]", None])
def test_other_masters_are_asked_for_what_they_were(master: str | None) -> None:
    assert cores_to_take(3, master, conf()) == {}


def test_the_users_own_number_of_cores_stands() -> None:
    assert cores_to_take(3, "spark://a:7077", conf(cores__max="16")) == {}


class Standalone:
    """Stands for a session on a standalone master, without a JVM."""

    def __init__(self, master: str, **settings: str) -> None:
        self.sparkContext = self
        self.master = master
        self._settings = conf(**settings)

    def getConf(self) -> SparkConf:
        return self._settings


def test_more_slots_than_a_standalone_cluster_gives_are_refused_with_the_way_out() -> None:
    slots = SparkSlots(Standalone("spark://127.0.0.1:7077", cores__max="4", task__cpus="2"))  # type: ignore[arg-type]
    slots.check(2)
    with pytest.raises(
        ClusterError, match=r"needs 3 slots .* has 2; lower the parallelism to 2, .* spark.cores.max=6 "
    ):
        slots.check(3)


def test_more_slots_than_the_executors_that_spark_takes_are_refused_with_the_way_out() -> None:
    slots = SparkSlots(Standalone("yarn", driver__host="192.0.2.7"))  # type: ignore[arg-type]
    slots.check(2)
    with pytest.raises(
        ClusterError, match=r"needs 3 slots .* has 2; .*raise spark.executor.instances or spark.executor"
    ):
        slots.check(3)

    def slots_max(**settings: str) -> int | None:
        return SparkSlots(Standalone("yarn", driver__host="192.0.2.7", **settings)).slots_max  # type: ignore[arg-type]

    assert slots_max(executor__instances="3", executor__cores="2") == 6
    assert slots_max(dynamicAllocation__enabled="true") is None


@pytest.mark.parametrize("driver_host", ["127.0.0.1", "localhost", "[::1]"])
def test_a_driver_that_executors_would_look_for_on_their_own_machines_is_refused(driver_host: str) -> None:
    session = Standalone("spark://192.0.2.1:7077,192.0.2.2:7077", driver__host=driver_host)
    with pytest.raises(
        ClusterError, match=r"look for this program at '.*', which is their own machine; unset SPARK_LOC"
    ):
        SparkSlots(session)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("master", "driver_host"),
    [
        ("spark://127.0.0.1:7077", "127.0.0.1"),
        ("spark://[::1]:7077", "localhost"),
        ("spark://192.0.2.1:7077", "192.0.2.7"),
        ("spark://192.0.2.1:7077", "no-such-name.invalid"),
        ("yarn", "192.0.2.7"),
        ("k8s://https://192.0.2.1:6443", "127.0.0.1"),
    ],
)
def test_a_driver_that_may_be_found_is_taken(master: str, driver_host: str) -> None:
    check_driver_host(master, driver_host, conf())


def test_an_address_of_ipv6_has_no_brackets() -> None:
    session = Standalone("spark://[2001:db8::1]:7077", driver__host="[2001:db8::10]")
    slots = SparkSlots(session)  # type: ignore[arg-type]
    assert (slots.driver_host, slots.bind_host) == ("2001:db8::10", "2001:db8::10")


def test_ports_are_those_that_spark_looks_for_free_ones_in() -> None:
    def ports(**settings: str) -> tuple[Ports, Ports]:
        slots = SparkSlots(Standalone("spark://192.0.2.1:7077", driver__host="192.0.2.7", **settings))  # type: ignore[arg-type]
        return slots.driver_ports, slots.slot_ports

    assert ports() == ports(blockManager__port="0") == (ANY_PORT, ANY_PORT)
    for either in ports(blockManager__port="7200"):
        assert (either.first, either.last) == (7200, 7216)
        assert "spark.blockManager.port=7200 and spark.port.maxRetries=16; raise spark.port.maxRetries" in either.set_by
    drivers, slots = ports(blockManager__port="7200", driver__blockManager__port="7100", port__maxRetries="2")
    assert (drivers.first, drivers.last, slots.first, slots.last) == (7100, 7102, 7200, 7202)
    assert "spark.driver.blockManager.port=7100" in drivers.set_by
    assert ports(blockManager__port="65530")[1].last == 65_535
    assert ports(driver__blockManager__port="7100")[1] == ANY_PORT
    for value in ("70000", "-3", "http"):
        with pytest.raises(ConfigError, match=r"spark\.blockManager\.port"):
            ports(blockManager__port=value)
    local = SparkSlots(Standalone("local[2]", blockManager__port="7200"))  # type: ignore[arg-type]
    assert (local.driver_ports, local.slot_ports) == (ANY_PORT, ANY_PORT), "no firewall is between them"


class Connected:
    """Stands for a session, and for a DataFrame, of a Spark Connect client, which needs grpc."""

    isStreaming = False

    @property
    def sparkContext(self) -> Any:
        raise AttributeError("[JVM_ATTRIBUTE_NOT_SUPPORTED]")


Connected.__module__ = "pyspark.sql.connect.session"
SAYS = "uses Spark Connect, whose client cannot start slots: midstream needs a classic Spark session .* SPARK_REMOTE"


def test_a_session_of_spark_connect_is_refused_with_the_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", object())
    monkeypatch.setattr(sessions, "how_spark_ended", lambda context: "")
    monkeypatch.setattr(SparkSession, "getActiveSession", Connected)
    with pytest.raises(ConfigError, match=SAYS):
        active_session()
    with pytest.raises(ConfigError, match=f"^DataFrameSource: .*{SAYS}"):
        DataFrameSource(Connected())  # type: ignore[arg-type]


@pytest.mark.parametrize("variable", ["SPARK_REMOTE", "SPARK_CONNECT_MODE_ENABLED"])
def test_no_session_is_made_where_spark_would_make_a_connected_one(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setitem(os.environ, variable, "sc://localhost")
    with pytest.raises(ConfigError, match=SAYS):
        get_session("local[2]")
