"""Which modules travel with a job, how, and what is reported of those that cannot."""

from __future__ import annotations

import importlib
import io
import os
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from machine import limit_s
from midstream import ConfigError, JobError
from midstream.api import user_modules as modules
from midstream.api.job_file import load_job
from midstream.api.user_modules import JobFile, check_extra, collect, note_modules
from midstream.engine.protocol.messages import JobModules
from midstream.runtime.process.process_slots import ProcessSlots
from midstream.runtime.process.unpacked_modules import UnpackedModules


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # an edit in the same second would not be seen
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("mods_"):
            del sys.modules[name]


def write(root: Path, **files: str) -> None:
    """`a__b`: file a/b.py."""
    for name, text in files.items():
        path = root / (name.replace("___", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text), encoding="utf-8")
    importlib.invalidate_caches()


def names(shipped: JobModules) -> list[str]:
    return zipfile.ZipFile(io.BytesIO(shipped.archive)).namelist() if shipped.archive else []


def mentioned(file: Path) -> JobModules:
    return collect(JobFile(str(file), ""), (), cloudpickle.dumps(None))


def test_a_job_of_a_usual_project_runs_in_slots_that_know_none_of_its_directories(tmp_path: Path) -> None:
    write(
        tmp_path,
        mods_common___lib="""
            from dataclasses import dataclass
            from pathlib import Path

            import mods_settings

            @dataclass
            class Seen:
                count: int = 0

            def factor():
                return int((Path(mods_settings.__file__).parent / "mods_data" / "factor.txt").read_text())
            """,
        mods_data_____init__="",
        mods_settings="import mods_data",
        mods_common___late="def add(value): return value + 1",
        jobs___mods_beside="def same(value): return value",
        jobs___mods_job="""
            from midstream import Environment, KeyedProcessFunction, ValueState
            from mods_common import lib
            from mods_beside import same

            class Count(KeyedProcessFunction):
                seen = ValueState()

                def process(self, row, ctx):
                    import mods_common.late

                    seen = self.seen.value or lib.Seen()
                    assert isinstance(seen, lib.Seen)
                    self.seen.value = lib.Seen(mods_common.late.add(seen.count))
                    yield {"n": same(self.seen.value.count * lib.factor())}

            env = Environment("layout", parallelism=2)
            rows = env.from_collection([{"k": 1}] * 3).key_by("k").process(Count(), schema={"n": int}).collect()
            """,
    )
    (tmp_path / "mods_data" / "factor.txt").write_text("7")
    sys.path.insert(0, str(tmp_path))
    env = load_job(tmp_path / "jobs" / "mods_job.py")
    rows = env.program.graph.nodes[-1].operator
    env.start(slots=ProcessSlots()).wait(limit_s(60))
    assert sorted(row["n"] for row in rows.sink.rows()) == [7, 14, 21]  # type: ignore[union-attr]  # of the operator that it is


def test_functions_of_a_module_that_makes_an_environment_travel_by_value(tmp_path: Path) -> None:
    write(tmp_path, mods_pipeline="from midstream import Environment\nenv = Environment()\ndef f(row): return row")
    sys.path.insert(0, str(tmp_path))
    pipeline = importlib.import_module("mods_pipeline")
    pickled = cloudpickle.dumps(pipeline.f)
    assert "mods_pipeline" not in modules._references(pickled)
    assert pipeline.env.program.file == JobFile(str(tmp_path / "mods_pipeline.py"), "")


def test_what_the_jobs_file_imports_anywhere_goes_along_and_what_that_imports(tmp_path: Path) -> None:
    write(
        tmp_path,
        mods_a="import mods_b",
        mods_b="def f():\n    from mods_space.inner import g",
        mods_space___inner="from . import other",
        mods_space___other="",
        mods_package_____init__="from .one import *",
        mods_package___one="import mods_of_package",
        mods_of_package="",
        mods_unused="",
        mods_only_for_types="",
        job="""
            from typing import TYPE_CHECKING
            if TYPE_CHECKING:
                import mods_only_for_types
            try:
                import mods_package
            except ImportError:
                import mods_nowhere
            def f():
                import mods_a, json, polars, midstream
            """,
    )
    (tmp_path / "mods_package" / "table.csv").write_text("1")
    (tmp_path / "mods_package" / ".hidden").mkdir()
    write(tmp_path, **{"mods_package___.hidden___x": ""})
    write(tmp_path, mods_space___unused="")
    (tmp_path / "mods_space" / "rows.csv").write_text("1")
    (tmp_path / "mods_package" / "env" / "lib").mkdir(parents=True)
    (tmp_path / "mods_package" / "env" / "pyvenv.cfg").write_text("")
    write(tmp_path, mods_package___env___lib___x="")
    sys.path.insert(0, str(tmp_path))
    shipped = mentioned(tmp_path / "job.py")
    assert names(shipped) == [
        "mods_a.py",
        "mods_b.py",
        "mods_of_package.py",
        "mods_package/__init__.py",
        "mods_package/one.py",
        "mods_package/table.csv",
        "mods_space/inner.py",
        "mods_space/other.py",
    ]
    assert shipped == mentioned(tmp_path / "job.py")
    assert not shipped.packages  # nothing of it is imported when the job is unpickled
    assert not set(sys.modules) & {"mods_a", "mods_b", "mods_package"}  # looking imports nothing


def test_files_directories_and_zips_that_are_named_go_along(tmp_path: Path) -> None:
    write(tmp_path, mods_file="import mods_helper", mods_helper="", mods_dir___x="import mods_helper")
    with zipfile.ZipFile(tmp_path / "b.zip", "w") as made:
        made.writestr("mods_zipped/__init__.py", "VALUE = 5")
    sys.path.insert(0, str(tmp_path))
    extra = check_extra([tmp_path / "mods_file.py", str(tmp_path / "mods_dir"), tmp_path / "b.zip"])
    shipped = collect(JobFile(None, ""), extra, cloudpickle.dumps(None))
    assert {"mods_file.py", "mods_helper.py", "mods_dir/x.py", "mods_zipped/__init__.py"} <= set(names(shipped))


@pytest.mark.parametrize(
    ("path", "message"),
    [("nowhere.py", "modules: there is no 'nowhere.py'"), ("data.csv", "is not a Python file"), ("my-dir", "'my-dir'")],
)
def test_what_cannot_be_a_module_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.csv").write_text("")
    (tmp_path / "my-dir").mkdir()
    with pytest.raises(ConfigError, match=message):
        check_extra([path])
    with pytest.raises(ConfigError, match="is one path; give a list"):
        check_extra(path)


def test_modules_of_no_file_are_refused_by_name(tmp_path: Path) -> None:
    import types

    module = types.ModuleType("mods_made")
    exec("def f(row): return row", module.__dict__)
    sys.modules["mods_made"] = module
    with pytest.raises(JobError, match="the job uses module 'mods_made', which was not loaded from a file"):
        collect(JobFile(None, ""), (), cloudpickle.dumps(module.f))
    sys.modules["pytest.mods_made"] = sys.modules.pop("mods_made")  # an installed package may make some of its own
    try:
        assert collect(JobFile(None, ""), (), b"cpytest.mods_made\nf\n.").packages[0][0] == "pytest"
    finally:
        del sys.modules["pytest.mods_made"]


def test_too_much_is_refused_with_the_biggest_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, mods_large_____init__="", mods_small="", job="import mods_large, mods_small")
    (tmp_path / "mods_large" / "model.bin").write_bytes(bytes(2**20))
    monkeypatch.setattr(modules, "MODULES_BYTES_MAX", 2**19)
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(
        JobError, match=r"have 1.0 MiB, up to 0.5 MiB .* is .*mods_large/model.bin \(1.0 MiB\).*executors"
    ):
        mentioned(tmp_path / "job.py")


def test_packages_that_unpickling_needs_are_named_with_their_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site-packages"
    write(site, mods_installed="", mods_optional="", mods_lazy="", mods_by_value="")
    (site / "Mods_Dist-1.2.dist-info").mkdir(parents=True)
    (site / "Mods_Dist-1.2.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: Mods-Dist\nVersion: 1.2\n")
    (site / "Mods_Dist-1.2.dist-info" / "top_level.txt").write_text("mods_installed\n")
    write(
        tmp_path,
        mods_user="""
            import mods_installed
            try:
                import mods_optional
            except ImportError:
                pass
            def f(row):
                import mods_lazy
            """,
        job="import mods_user, mods_by_value",
    )
    sys.path[:0] = [str(tmp_path), str(site)]
    monkeypatch.setattr(modules, "_distributions", modules._distributions.__wrapped__)
    f = importlib.import_module("mods_user").f
    shipped = collect(JobFile(str(tmp_path / "job.py"), ""), (), cloudpickle.dumps({"function": f}))
    assert shipped.packages == (("mods_installed", "Mods-Dist 1.2"),)
    assert names(shipped) == ["mods_user.py"]


def test_a_slot_that_lacks_a_package_names_it_and_its_interpreter() -> None:
    lacking = UnpackedModules(JobModules(packages=(("mods_lacking", "mods-dist 1.2"), ("json", "json"))))
    with pytest.raises(ConfigError, match=rf"{sys.executable} on .* lacks .*imports: mods-dist 1.2; install"):
        lacking.unpickle(b"")
    with pytest.raises(ConfigError, match="has no module 'mods_lacking', which the job's code imports"):
        UnpackedModules(JobModules()).unpickle(b"cmods_lacking\nf\n.")


def test_a_module_that_cannot_be_imported_in_a_slot_is_reported_with_the_reason() -> None:
    unpacked = UnpackedModules(
        zipped(mods_session="raise RuntimeError('no driver')", mods_binary="from json import nope")
    )
    with pytest.raises(JobError, match=r"RuntimeError in a slot on .*: no driver; slots import the modules"):
        unpacked.unpickle(b"cmods_session\nf\n.")
    with pytest.raises(ConfigError, match="cannot import what the job's code imports: cannot import name 'nope'"):
        unpacked.unpickle(b"cmods_binary\nf\n.")
    unpacked.close()


def test_a_module_that_changed_since_it_was_imported_must_be_loaded_again(tmp_path: Path) -> None:
    write(tmp_path, mods_edited="VALUE = 1", job="import mods_edited")
    sys.path.insert(0, str(tmp_path))
    module = importlib.import_module("mods_edited")
    note_modules()
    mentioned(tmp_path / "job.py")
    write(tmp_path, mods_edited="VALUE = 22")
    with pytest.raises(JobError, match=r"'mods_edited' \(.*\) has been changed since it was imported.*reload"):
        mentioned(tmp_path / "job.py")
    importlib.reload(module)
    assert mentioned(tmp_path / "job.py").archive


def zipped(**files: str) -> JobModules:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as made:
        for name, text in files.items():
            made.writestr(f"{name}.py", text)
    return JobModules(buffer.getvalue())


def test_one_process_serves_jobs_with_other_versions_of_a_module_one_after_the_other(tmp_path: Path) -> None:
    pickled = b"cmods_version\nVALUE\n."
    present = type(sys)("mods_version")
    sys.modules["mods_version"] = present
    path = list(sys.path)
    for value in ("first", "second"):
        unpacked = UnpackedModules(zipped(mods_version=f"VALUE = {value!r}"))
        assert unpacked.unpickle(pickled) == value
        directory = Path(sys.path[0]).parent
        unpacked.close()
        assert not directory.exists()
        assert sys.modules["mods_version"] is present and sys.path == path


def test_what_a_killed_slot_leaves_is_removed_by_the_next_one_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    living = UnpackedModules(zipped(mods_x=""))
    left = UnpackedModules(zipped(mods_x=""))
    assert left._lock is not None
    os.close(left._lock)
    other = UnpackedModules(zipped(mods_x=""))
    assert set(tmp_path.iterdir()) == {living._directory, other._directory}
    left._lock = None
    for each in (other, left, living):
        each.close()
    assert not list(tmp_path.iterdir())
