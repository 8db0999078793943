"""Shared fixtures: one Spark session for all tests that need one."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from effort import is_its_turn
from machine import limit_s

if TYPE_CHECKING:
    from midstream.runtime.driver.driver import Driver
    from midstream.runtime.driver.job import Job

os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
os.environ.setdefault("POLARS_MAX_THREADS", "1")
# JVMs that live for seconds: no second compiler, and Spark's classes from the archive that tools/spark_archive.py has made.
_QUICK_JVM = f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Xlog:disable -XX:SharedArchiveFile={sys.prefix}/spark.jsa"
os.environ.setdefault("SPARK_SUBMIT_OPTS", f'{_QUICK_JVM} "-Dspark.executor.defaultJavaOptions={_QUICK_JVM}"')
for _name in ("SPARK_LAUNCHER_OPTS", "SPARK_DAEMON_JAVA_OPTS"):
    os.environ.setdefault(_name, _QUICK_JVM)


pytest_plugins = ["reporting"]

# A loaded machine is no fault: nothing has a limit of time that does not stretch with it.
hypothesis.settings.register_profile("midstream", deadline=None)
hypothesis.settings.load_profile("midstream")

SERVERS = {"spark", "postgres_server", "kafka", "kafka_broker", "kafka_broker_of_all"}
"""Fixtures that start a server. Tests that start one by themselves have the marker `systems` or `spark`."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        needs_server = not SERVERS.isdisjoint(getattr(item, "fixturenames", ()))
        if needs_server or item.get_closest_marker("spark") is not None:
            item.add_marker("systems")
    if os.environ.get("NIGHTLY"):
        return
    nightly = [item for item in items if item.get_closest_marker("nightly") is not None]
    named = {Path(argument.partition("::")[0]).name for argument in config.args}
    for item in nightly:
        if item.path.name in named:
            item.add_marker(pytest.mark.skip(reason="takes long and has a quicker counterpart; NIGHTLY=1 runs it"))
    turns = {item: mark.args[0] for item in items if (mark := item.get_closest_marker("turns")) is not None}
    left = {item for item in nightly if item.path.name not in named}
    left |= {i for i, shares in turns.items() if i.path.name not in named and not is_its_turn(i.nodeid, shares)}
    config.hook.pytest_deselected(items=[item for item in items if item in left])
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def spark() -> Iterator[Any]:
    """`local[4]` on loopback, no UI; stopped at the end of the test session."""
    from midstream.spark.session import get_session

    session = get_session("local[4]", "midstream-tests")
    session.conf.set("spark.sql.shuffle.partitions", "4")
    yield session
    session.stop()


@pytest.fixture
def running() -> Iterator[list[Job]]:
    """Jobs that the test starts: none is left when it ends."""
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        job.cancel("the test is over", 30)


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that everyone may enter, unlike those of pytest; see `permissions.unprivileged`."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        path.chmod(0o755)
        yield path
        path.chmod(0o755)


@pytest.fixture(autouse=True)
def midstream_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Jobs that tests start announce themselves in a place of their own."""
    monkeypatch.setenv("MIDSTREAM_HOME", str(tmp_path_factory.getbasetemp() / "midstream-home"))


@pytest.fixture(autouse=True)
def no_job_is_left() -> Iterator[None]:
    """A job that outlives its test, as when the test is out of time, is ended, so that only this test fails."""

    def running() -> set[Driver]:
        driver = sys.modules.get("midstream.runtime.driver.driver")
        return {job for job in driver._running if not job.ended.is_set()} if driver is not None else set()

    before = running()
    yield
    left = running() - before
    for job in left:
        job.cancel("its test is over")
    for job in left:
        assert job.ended.wait(limit_s(30)), (
            f"job {job.plan.config.name!r}, which the test has left running, does not end"
        )
    assert not left, f"the test has left jobs running: {sorted(job.plan.config.name for job in left)}"


@pytest.fixture(autouse=True)
def no_job_ends_badly(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Whatever goes wrong while a driver winds up is logged, not raised: here it fails the test."""
    yield
    for record in caplog.get_records("call"):
        assert "ending went wrong" not in record.getMessage(), record.exc_text or record.exc_info


@pytest.fixture(autouse=True)
def only_own_modules_travel() -> Iterator[None]:
    """A program has cloudpickle take its modules along for as long as it runs; a test is not one program."""
    import types

    import cloudpickle.cloudpickle as registry

    before = registry.list_registry_pickle_by_value()
    yield
    for name in registry.list_registry_pickle_by_value() - before:
        registry.unregister_pickle_by_value(sys.modules.get(name) or types.ModuleType(name))
