"""Packages that only some jobs need: midstream is imported without them, and says how to install them where they are used."""

from __future__ import annotations

import subprocess
import sys

import pytest

from midstream import ConfigError, Environment

EXTRAS = {"psycopg": "postgres", "deltalake": "delta"}


def test_modules_are_imported_without_any_extra():
    code = (
        f"import sys; sys.modules.update(dict.fromkeys({list(EXTRAS)!r}))\n"
        "import midstream, midstream.api.stream, midstream.connectors.postgres, midstream.connectors.delta\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", EXTRAS)
def test_a_sink_whose_package_is_missing_names_the_command_that_installs_it(package, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, package, None)  # as Python marks what cannot be imported
    stream = Environment("extras").from_collection([{"n": 1}])
    with pytest.raises(ConfigError, match=rf"test_extras\.py.* pip install 'midstream\[{EXTRAS[package]}\]'") as error:
        if package == "psycopg":
            stream.write_postgres("dbname=x", "numbers")
        else:
            stream.write_delta(tmp_path / "numbers")
    assert sys.executable in str(error.value)
