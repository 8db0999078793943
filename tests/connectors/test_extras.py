"""Packages that only some jobs need: midstream is imported without them, and says how to install them where they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from machine import limit_s
from midstream import ConfigError, Environment

EXTRAS = {"psycopg": "postgres", "deltalake": "delta", "pyiceberg": "iceberg", "confluent_kafka": "kafka"}


def test_modules_are_imported_without_any_extra():
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({list(EXTRAS)!r}))\n"
        "import midstream, midstream.api.environment, midstream.api.table_joins, midstream.connectors.delta.delta_sink\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=limit_s(60), check=False
    )
    assert done.returncode == 0, done.stderr


def hide(package, monkeypatch):
    """Make a package, and what of midstream is only imported with it, look as if they had not been imported."""
    folder = f"midstream.connectors.{EXTRAS[package]}"
    if package != "deltalake":
        for name in [name for name in sys.modules if name == folder or name.startswith(f"{folder}.")]:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks what cannot be imported


@pytest.mark.parametrize("package", EXTRAS)
def test_a_sink_whose_package_is_missing_names_the_command_that_installs_it(package, monkeypatch, tmp_path):
    hide(package, monkeypatch)
    stream = Environment("extras").from_collection([{"n": 1}])
    with pytest.raises(ConfigError, match=rf"test_extras\.py.* pip install 'midstream\[{EXTRAS[package]}\]'") as error:
        if package == "psycopg":
            stream.write_postgres("dbname=x", "numbers")
        elif package == "confluent_kafka":
            stream.write_kafka("x:9092", "numbers", guarantee="at_least_once")
        elif package == "pyiceberg":
            stream.write_iceberg("lake.numbers", catalog="prod")
        else:
            stream.write_delta(tmp_path / "numbers")
    assert sys.executable in str(error.value)


def test_a_source_whose_package_is_missing_names_the_command_that_installs_it(monkeypatch):
    hide("confluent_kafka", monkeypatch)
    with pytest.raises(ConfigError, match=r"test_extras\.py.* pip install 'midstream\[kafka\]'"):
        Environment("extras").read_kafka("x:9092", "numbers", format="bytes")


def test_avro_without_the_registry_client_names_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "confluent_kafka.schema_registry.schema_registry_client", None)
    with pytest.raises(ConfigError, match=r"test_extras\.py.* pip install 'midstream\[kafka-avro\]'"):
        Environment("extras").read_kafka("x:9092", "numbers", format="avro", registry={"url": "http://x"})


@pytest.mark.parametrize(
    ("module", "more"),
    [
        ("google.protobuf", {}),
        ("confluent_kafka.schema_registry.schema_registry_client", {"registry": {"url": "http://x"}}),
    ],
)
def test_protobuf_without_its_packages_names_the_command_that_installs_them(monkeypatch, module, more):
    from protobuf_samples import Order

    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=r"test_extras\.py.* pip install 'midstream\[kafka-protobuf\]'"):
        Environment("extras").read_kafka("x:9092", "numbers", format="protobuf", message=Order, **more)
