"""From a file to its Environment: what is refused, and with which message."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path

import pytest

from midstream import ConfigError, Environment, JobError, SchemaError
from midstream.api.job_file import load_job
from midstream.cli.error_text import user_traceback
from midstream.runtime.process.process_slots import ProcessSlots

GOOD = """
from midstream import Environment

env = Environment("good")
env.from_collection([{"v": 1}]).map(lambda row: row).print()
if __name__ == "__main__":
    env.execute()
"""


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("job_"):
            del sys.modules[name]


def write(directory: Path, text: str, name: str = "job.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text), encoding="utf-8")
    return path


def test_the_one_environment_of_a_file_is_its_job(tmp_path):
    env = load_job(write(tmp_path, GOOD))
    assert isinstance(env, Environment)
    assert env.name == "good"
    assert "collection → map → print" in env.explain()


def test_one_environment_under_two_names_is_one(tmp_path):
    assert load_job(write(tmp_path, GOOD + "\nsame = env\n")).name == "good"


def test_a_dataclass_of_the_file_may_have_annotations_that_are_text(tmp_path):
    """The standard library looks up what they mean in the module's entry of sys.modules."""
    file = write(
        tmp_path,
        """
        from __future__ import annotations
        from dataclasses import dataclass
        from midstream import Environment, KeyedProcessFunction, ValueState

        @dataclass(frozen=True, slots=True)
        class Visit:
            n: int

        class Held(KeyedProcessFunction):
            held = ValueState()
            def process(self, row, ctx):
                self.held.value = Visit(row["n"])

        env = Environment("job")
        env.from_collection([{"n": 1}]).key_by("n").process(Held(), {"n": int}).print()
        """,
    )
    load_job(file).execute(slots=ProcessSlots())
    assert "__midstream__" not in sys.modules


def test_modules_next_to_the_file_can_be_imported(tmp_path):
    write(tmp_path, "NAME = 'from beside'", "job_settings.py")
    path = write(tmp_path, "from midstream import Environment\nfrom job_settings import NAME\nenv = Environment(NAME)")
    assert load_job(path).name == "from beside"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "has no Environment among its global variables"),
        ("from midstream import Environment\ndef make():\n    return Environment()", "not inside a function"),
        ("from midstream import Environment\na, b = Environment(), Environment()", r"has 2 Environments \(a, b\)"),
        ("def broken(:\n    pass", r"job.py, line 1: invalid syntax"),
        ("import sys\nsys.exit(3)", r"ended the program \(SystemExit: 3\)"),
        ("import no_such_module_anywhere", "raised ModuleNotFoundError: No module named 'no_such_module_anywhere'"),
        ("\0", "is not Python source|source code"),
    ],
)
def test_files_without_a_usable_job_are_refused(tmp_path, text, message):
    with pytest.raises(JobError, match=message) as caught:
        load_job(write(tmp_path, text))
    assert "job.py" in str(caught.value)


def test_a_syntax_error_is_shown_at_its_line_and_only_once(tmp_path):
    with pytest.raises(JobError) as caught:
        load_job(write(tmp_path, "env = (1\nfoo = 2"))
    shown = user_traceback(caught.value.__cause__)
    assert "env = (1" in shown and "^" in shown
    assert "never closed" in str(caught.value) and "never closed" not in shown


def test_missing_files_and_directories_are_refused(tmp_path):
    with pytest.raises(JobError, match="there is no such file"):
        load_job(tmp_path / "nope.py")
    with pytest.raises(JobError, match="is a directory"):
        load_job(tmp_path)


def test_an_exception_in_the_file_keeps_the_users_traceback_and_no_frame_of_ours(tmp_path):
    path = write(tmp_path, "def settle():\n    return 1 / 0\n\nsettle()\n")
    with pytest.raises(JobError, match="raised ZeroDivisionError: division by zero") as caught:
        load_job(path)
    shown = user_traceback(caught.value.__cause__)
    assert "line 2, in settle" in shown
    assert "loading.py" not in shown


def test_a_wrong_pipeline_is_refused_with_its_line(tmp_path):
    path = write(
        tmp_path,
        'from midstream import Environment\nenv = Environment()\n\nenv.from_collection([{"v": 1}]).key_by("w")\n',
    )
    with pytest.raises(SchemaError, match=r"^job.py:4: key_by: key column 'w' is not in the stream's schema \(v\)"):
        load_job(path)


def test_an_argument_that_no_stream_has_seen_yet_is_refused_with_its_line_too(tmp_path):
    text = "from midstream import WatermarkStrategy\n\nstrategy = WatermarkStrategy.bounded('soon')\n"
    with pytest.raises(ConfigError, match=r"^job.py:3: max_delay: 'soon' is not a duration"):
        load_job(write(tmp_path, text))


@pytest.mark.parametrize("call", ["execute", "start"])
def test_a_file_that_starts_its_job_when_loaded_is_refused(tmp_path, call):
    path = write(tmp_path, GOOD.replace('if __name__ == "__main__":\n    env.execute()', f"env.{call}()"))
    with pytest.raises(JobError, match=r"job.py:\d+: starts the job while its file is being loaded.*__main__"):
        load_job(path)
