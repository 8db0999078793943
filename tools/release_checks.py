"""What tools/release.sh checks of a release, one function each. Run: python tools/release_checks.py NAME [ARGUMENT ...]"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
IMPORTS = {
    "postgres": ["psycopg", "midstream.connectors.postgres.postgres_sink"],
    "delta": ["deltalake", "pyroaring", "midstream.connectors.delta.delta_sink"],
    "iceberg": ["pyiceberg", "pyiceberg_core", "midstream.connectors.iceberg.iceberg_sink"],
    "kafka": ["confluent_kafka", "midstream.connectors.kafka.kafka_source"],
    "kafka-avro": ["confluent_kafka.schema_registry", "midstream.connectors.kafka.avro_values"],
    "kafka-protobuf": ["google.protobuf", "midstream.connectors.kafka.protobuf_values"],
    "object-stores": ["obstore", "botocore"],
    "openlineage": ["openlineage.client"],
    "otel": ["opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"],
}
"""Of each extra that users install."""
NOT_FOR_USERS = {"bench", "dev"}
NOT_IN_A_WHEEL = re.compile(r"(^|/)(midstream_lab|lab|tests|benchmarks|examples|tools)/")
IN_A_WHEEL = ("midstream/py.typed", "midstream/page/static/page.html", "midstream/page/static/page.js")
IN_AN_SDIST = ("LICENSE", "README.md", "pyproject.toml", "src/midstream/py.typed")


def refuse(message: str) -> None:
    sys.exit(f"release: {message}")


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def versions(*flags: str) -> None:
    version = PROJECT["version"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)(?: \((.+)\))?$", changelog, re.MULTILINE)
    if newest is None or newest[1] != version:
        refuse(f"pyproject.toml has version {version}; the newest heading of CHANGELOG.md is {newest and newest[0]!r}")
    tags = git("tag", "--points-at", "HEAD").split()
    wrong = [tag for tag in tags if re.match(r"v\d", tag) and tag != f"v{version}"]
    if wrong:
        refuse(f"HEAD has the tag {wrong[0]}, and pyproject.toml has version {version}")
    if "--tag" in flags:
        if f"v{version}" not in tags:
            refuse(f"HEAD has no tag v{version}; create it: git tag v{version}")
        if newest is not None and newest[2] == "unreleased":
            refuse(f"CHANGELOG.md calls {version} unreleased; put the date there")
        if not (ROOT / f"tests/released/{version}.zip").exists():
            refuse(f"tests/released has no checkpoint of {version}; store it: .venv/bin/python tests/released_job.py")
        if git("status", "--porcelain"):
            refuse("there are uncommitted changes")


def contents(directory: str) -> None:
    [wheel] = Path(directory).glob("*.whl")
    [sdist] = Path(directory).glob("*.tar.gz")
    packed = set(zipfile.ZipFile(wheel).namelist())
    if unwanted := sorted(name for name in packed if NOT_IN_A_WHEEL.search(name)):
        refuse(f"the wheel has {', '.join(unwanted)}")
    if not any(name.endswith("dist-info/licenses/LICENSE") for name in packed):
        refuse("the wheel has no LICENSE")
    if missing := [name for name in IN_A_WHEEL if name not in packed]:
        refuse(f"the wheel lacks {', '.join(missing)}")
    sources = {f"midstream/{path.relative_to(ROOT / 'src/midstream')}" for path in map(Path, tracked_sources())}
    if missing := sorted(name for name in sources - packed if not NOT_IN_A_WHEEL.search(name)):
        refuse(f"the wheel lacks {', '.join(missing)}")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    if missing := [name for name in IN_AN_SDIST if name not in names]:
        refuse(f"the sdist lacks {', '.join(missing)}")


def tracked_sources() -> list[str]:
    return [str(ROOT / name) for name in git("ls-files", "src/midstream").splitlines()]


def extras() -> None:
    print(",".join(IMPORTS))


def without_extras(python: str) -> None:
    """Importing midstream with no extra imports none of their packages, and a job that needs one names the extra."""
    declared = set(PROJECT["optional-dependencies"]) - NOT_FOR_USERS
    if declared != set(IMPORTS):
        refuse(f"the extras are {sorted(declared)}; tools/release_checks.py knows {sorted(IMPORTS)}")
    code = "import midstream; [getattr(midstream, name) for name in midstream.__all__]; print(midstream.__version__)"
    version = run(python, code)
    if version != PROJECT["version"]:
        refuse(f"what is installed has version {version}, and pyproject.toml {PROJECT['version']}")


def imports(python: str) -> None:
    for extra, modules in IMPORTS.items():
        run(python, "; ".join(f"import {module}" for module in modules))
        print(f"        {extra}: {', '.join(modules)}")


def run(python: str, code: str) -> str:
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False, cwd="/", timeout=300)
    if done.returncode:
        refuse(f"{code}\n{done.stderr}")
    return done.stdout.strip()


def oldest() -> None:
    """A constraint for each dependency of what users install: the lowest version that pyproject.toml allows."""
    optional = PROJECT["optional-dependencies"]
    lines = [*PROJECT["dependencies"], *(line for name in IMPORTS for line in optional[name])]
    found: dict[str, str] = {}
    for line in lines:
        match = re.fullmatch(r"([\w-]+)(?:\[[\w,-]+\])?>=([\d.]+)", line)
        if match is None:
            refuse(f"pyproject.toml: {line!r} has no lowest version; write name>=version")
        else:
            found[match[1]] = match[2]
    print("\n".join(f"{name}=={version}" for name, version in found.items()))


if __name__ == "__main__":
    checks = {check.__name__: check for check in (versions, contents, extras, without_extras, imports, oldest)}
    checks[sys.argv[1]](*sys.argv[2:])
