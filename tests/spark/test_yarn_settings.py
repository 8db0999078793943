"""Where YARN is, by Hadoop's settings, and whether it is there. None of it runs here: tests/spark/test_yarn.py runs one."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark import SparkConf

import midstream
from machine import limit_s
from midstream import Environment
from midstream.connectors.files.file_sink import FileSink
from midstream.engine.core.errors import ClusterError, ConfigError, UnavailableError
from midstream.spark.spark_slots import check_driver_host
from midstream.spark.yarn import check_managers, check_named, resource_managers, waiting_is_reported
from waiting import until

pytestmark = pytest.mark.spark


def conf(**settings: str) -> SparkConf:
    """`__` stands for a dot, `_` for a dash."""
    made = SparkConf(loadDefaults=False)
    for name, value in settings.items():
        made.set(f"spark.hadoop.yarn.resourcemanager.{name.replace('__', '.').replace('_', '-')}", value)
    return made


def test_without_the_directory_of_hadoops_settings_nobody_knows_where_yarn_is() -> None:
    with pytest.raises(
        ConfigError, match=r"neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set, .* set one to the directory"
    ):
        check_named({"HADOOP_CONF_DIR": ""})
    check_named({"YARN_CONF_DIR": "/etc/hadoop"})


def test_resource_managers_are_those_that_hadoop_reads_of_its_settings(spark: Any) -> None:
    assert resource_managers(conf()) == [("0.0.0.0", 8032)]
    assert resource_managers(conf(hostname="manager")) == [("manager", 8032)]
    assert resource_managers(conf(hostname="manager", address="other:1")) == [("other", 1)]
    assert resource_managers(conf(address="[2001:db8::1]:1")) == [("2001:db8::1", 1)]
    two = conf(ha__rm_ids="a, b", hostname__a="first", address__b="second:2")
    assert resource_managers(two) == [("first", 8032), ("second", 2)]


def test_a_resource_manager_that_is_not_there_is_told_at_once(spark: Any, tmp_path: Path) -> None:
    named = {"HADOOP_CONF_DIR": str(tmp_path)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        check_managers(conf(ha__rm_ids="a,b", address__a="127.0.0.1:1", address__b=f"127.0.0.1:{port}"), named)
    with pytest.raises(
        UnavailableError, match=rf"127.0.0.1:{port}: .*=\S+, where there is no yarn-site.xml; start it, or"
    ):
        check_managers(conf(address=f"127.0.0.1:{port}"), named)
    (tmp_path / "yarn-site.xml").touch()
    with pytest.raises(
        UnavailableError, match=rf"of HADOOP_CONF_DIR={tmp_path}; start it, or let HADOOP_CONF_DIR name"
    ):
        check_managers(conf(address=f"127.0.0.1:{port}"), named)


def test_a_driver_that_containers_would_look_for_on_their_own_machines_is_refused(spark: Any) -> None:
    with pytest.raises(ClusterError, match=r"executors of 'yarn' would look for this program at '127.0.0.1'"):
        check_driver_host("yarn", "127.0.0.1", conf(hostname="192.0.2.1"))
    for here in ("127.0.0.1", "0.0.0.0"):
        check_driver_host("yarn", "127.0.0.1", conf(hostname=here))


def test_a_long_wait_for_a_container_is_told_once_with_the_way_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.spark.yarn.REPORT_AFTER_S", 0.01)
    with waiting_is_reported():
        until("a word", lambda: "no room in the queue" in caplog.text)
    assert "another queue (spark.yarn.queue)" in caplog.text
    assert len(caplog.records) == 1


def test_a_path_that_yarn_deletes_with_the_container_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    container = tmp_path / "container_1795493021330_0003_01_000001"
    container.mkdir()
    monkeypatch.chdir(container)
    Environment("visits", checkpoint_dir="ck")  # a directory that only looks like one
    monkeypatch.setenv("CONTAINER_ID", container.name)
    for path in ("ck", str(container / "tmp" / "ck")):
        with pytest.raises(
            ConfigError,
            match=rf"checkpoint_dir: the path '\S*ck' is {container}/\S*ck here, and YARN deletes .* give a URL, or an",
        ):
            Environment("visits", checkpoint_dir=path)
    with pytest.raises(ConfigError, match=r"tls: the path 'keys' is "):
        Environment("visits", tls="keys")
    with pytest.raises(ConfigError, match=r"FileSink: the path 'out' is .* YARN deletes"):
        FileSink("out", format="jsonl")
    Environment("visits", checkpoint_dir=tmp_path / "ck")
    monkeypatch.chdir(tmp_path)
    Environment("visits", checkpoint_dir="ck")
    FileSink("out", format="jsonl")


def test_settings_for_spark_submit_do_not_keep_a_program_from_being_its_own_driver(tmp_path: Path) -> None:
    (tmp_path / "spark-defaults.conf").write_text("spark.submit.deployMode cluster\n")
    program = "from midstream.spark.session import get_session; print(get_session('local[1]').range(3).count())"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "SPARK_CONF_DIR": str(tmp_path), "PYTHONPATH": str(Path(midstream.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=limit_s(120),
        check=False,
    )
    assert (done.stdout, done.returncode) == ("3\n", 0), done.stderr
