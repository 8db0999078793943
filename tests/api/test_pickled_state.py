"""Objects of the job's own classes in untyped state, over a stop and a new start of the same file."""

from __future__ import annotations

import textwrap
from pathlib import Path

import polars as pl
import pytest

from machine import limit_s
from midstream import JobError
from midstream.api.job_file import load_job
from midstream.runtime.process.process_slots import ProcessSlots
from waiting import until

JOB = """
    from dataclasses import dataclass
    from pathlib import Path

    import numpy as np
    from midstream import Environment, KeyedProcessFunction, MapState, ValueState, no_restart
    from midstream.connectors.memory.generator_source import GeneratorSource

    import jobs
    from model import page_of

    @dataclass
    class Visit:
        pages: list
        def count(self):
            return len(self.pages)

    class Visits(KeyedProcessFunction):
        visit = ValueState()
        by_page = MapState()

        def process(self, row, ctx):
            if self.visit.value is None:
                self.visit.value = Visit([])
            visit = self.visit.value
            assert type(visit) is Visit, type(visit).__module__
            page = page_of(row["n"] %% 3)
            visit.pages.append(page)
            self.by_page[page] = self.by_page.get(page, 0) + 1
            assert sum(self.by_page.values()) == visit.count(), dict(self.by_page)
            return {"k": row["k"], "nth": visit.count()}

    class Held(KeyedProcessFunction):
        held = ValueState()
        def process(self, row, ctx):
            self.held.value = %(held)s
            return row

    env = Environment("visits", checkpoint_dir=%(directory)r, checkpoint_interval="100 ms", restart=no_restart()%(more)s)
    numbers = GeneratorSource(lambda i: {"k": i %% 5, "n": i}, 20_000, rows_per_s=%(rate)s)
    rows = env.source(jobs.Held(numbers, Path(%(rest)r), first=10_000)).uid("rows")
    counted = rows.key_by("k").process(%(function)s, schema={"k": int, "%(column)s": int}).uid("counts")
    counted.write_jsonl(%(out)r).uid("out")
"""


MODULES = {  # the job's functions refer to the one, and only that to the class of the values
    "model.py": "def page_of(id):\n    from pages import Page\n    return Page(id)\n",
    "pages.py": "from dataclasses import dataclass\n\n@dataclass(frozen=True)\nclass Page:\n    id: int\n",
}


def job_file(
    directory: Path, function: str = "Visits()", held: str = "1", rate: float | None = 4_000, more: str = ""
) -> Path:
    directory.mkdir(exist_ok=True)
    for name, code in MODULES.items():
        if not (directory / name).exists():
            (directory / name).write_text(code)
    if rate is None:  # one that is not to be stopped: it reads everything
        (directory / "rest").touch()
    file = directory / "job.py"
    text = textwrap.dedent(JOB) % {
        "directory": str(directory / "ck"),
        "out": str(directory / "out"),
        "function": function,
        "column": "nth" if function == "Visits()" else "n",
        "held": held,
        "rate": rate,
        "rest": str(directory / "rest"),
        "more": more,
    }
    file.write_text(text)
    return file


@pytest.mark.systems
def test_values_of_the_jobs_own_classes_are_of_these_again_after_a_new_start(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = job_file(tmp_path)
    job = load_job(file).start(slots=ProcessSlots())
    until("two checkpoints", lambda: job.status().checkpoints_completed >= 2)
    job.stop()
    job = load_job(job_file(tmp_path, rate=None)).start(slots=ProcessSlots(), restore_from="latest")
    job.wait(limit_s(60))
    written = pl.read_ndjson(str(tmp_path / "out" / "*.jsonl"))
    assert sorted(written.rows()) == [(k, nth) for k in range(5) for nth in range(1, 4_001)]


def test_a_value_that_could_not_be_read_back_fails_the_job_naming_state_and_way_out(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    file = job_file(tmp_path, function="Held()", held="np.random.default_rng(0)", more=", tolerable_failures=0")
    with pytest.raises(JobError, match=r"state 'held'.*trusted_packages=\['numpy'\]"):
        load_job(file).start(slots=ProcessSlots()).wait(limit_s(60))


def test_a_package_that_the_job_trusts_may_be_in_its_state(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    more = ", trusted_packages=['numpy'], tolerable_failures=0"
    file = job_file(tmp_path, function="Held()", held="np.random.default_rng(0)", rate=None, more=more)
    load_job(file).start(slots=ProcessSlots()).wait(limit_s(60))
