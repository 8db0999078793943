"""`midstream new NAME`: creates a first job, its test, and instructions."""

from __future__ import annotations

import keyword
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from rich.text import Text

from midstream.cli.formatting import printable
from midstream.cli.json_types import NewFiles
from midstream.cli.output import Answer
from midstream.engine.core.errors import ConfigError, StorageError

_NAME: Final = re.compile(r"[a-zA-Z][a-zA-Z0-9_]*")
_TAKEN: Final = frozenset(
    ("conftest", "setup", "tests", "sitecustomize", "usercustomize", "con", "prn", "aux", "nul")
    + tuple(f"{device}{number}" for device in ("com", "lpt") for number in range(1, 10))
)

JOB: Final = '''\
"""Adds up what each user has spent so far, and reports users without an order for an hour."""

from datetime import datetime, timedelta
from pathlib import Path

from midstream import DataStream, Environment, KeyedProcessFunction, ListState, ValueState, WatermarkStrategy

ORDER = {"user": str, "price": int, "at": datetime}
SPENT = {"user": str, "spent": int}
SILENT = {"user": str, "since": datetime}
HOUR = timedelta(hours=1)


class Spending(KeyedProcessFunction):
    spent = ValueState(int, default=0)
    times = ListState(datetime)

    def process(self, row, ctx):
        self.spent.value += row["price"]
        self.times.append(row["at"])
        ctx.timers.event_time(row["at"] + HOUR)
        return {"user": row["user"], "spent": self.spent.value}

    def on_timer(self, time, ctx):
        since = time - HOUR
        self.times.set([at for at in self.times if at > since])
        # orders of a later time may have been processed already: they do not count yet
        if not any(at <= time for at in self.times):
            ctx.side_output("silent", {"user": ctx.key, "since": since})


def spending(orders: DataStream) -> DataStream:
    """From orders to what each user has spent; those who are silent are in the side output "silent"."""
    timed = orders.with_watermarks("at", WatermarkStrategy.bounded("5 s"))
    return timed.key_by("user").process(Spending(), SPENT, side_outputs={"silent": SILENT}).uid("spending")


HERE = Path(__file__).parent
env = Environment("@NAME@", checkpoint_dir=HERE / "checkpoints")
orders = env.read_files(HERE / "orders", schema=ORDER).uid("orders")
spent = spending(orders)
spent.write_jsonl(HERE / "spent").uid("spent")
spent.side_output("silent").print("silent: ").uid("silent")

if __name__ == "__main__":
    env.execute()
'''

TEST: Final = """\
from datetime import datetime

from @NAME@ import ORDER, SPENT, SILENT, Spending, env

from midstream import testing


def test_what_a_user_has_spent_adds_up():
    result = testing.run(env, {"orders": [
        {"user": "ann", "price": 3, "at": "2024-01-01 12:00"},
        {"user": "bob", "price": 5, "at": "2024-01-01 12:01"},
        {"user": "ann", "price": 4, "at": "2024-01-01 12:02"},
    ]})
    assert result["spent"] == [
        {"user": "ann", "spent": 3},
        {"user": "bob", "spent": 5},
        {"user": "ann", "spent": 7},
    ]


def test_a_user_who_is_silent_for_an_hour_is_reported_once():
    with testing.job(env) as job:
        job.feed("orders", {"user": "ann", "price": 3, "at": "2024-01-01 12:00"})
        job.feed("orders", {"user": "ann", "price": 3, "at": "2024-01-01 12:30"})
        job.advance_to("2024-01-01 13:29")
        assert job.take("silent") == []
        job.advance_to("2024-01-01 13:30")
        assert job.take("silent") == [{"user": "ann", "since": datetime(2024, 1, 1, 12, 30)}]


def test_later_orders_do_not_change_that():
    rows = [
        {"user": "ann", "price": 3, "at": "2024-01-01 12:00"},
        {"user": "bob", "price": 3, "at": "2024-01-01 13:30"},
        {"user": "ann", "price": 3, "at": "2024-01-01 14:00"},
    ]
    assert {"user": "ann", "since": datetime(2024, 1, 1, 12)} in testing.run(env, {"orders": rows})["silent"]
    testing.check_cuts(env, {"orders": rows})


def test_the_state_survives_a_failure_at_another_parallelism():
    function = testing.harness(
        Spending(), ORDER, SPENT, key="user", event_time="at", side_outputs={"silent": SILENT}
    )
    function.process({"user": "ann", "price": 3, "at": "2024-01-01 12:00"})
    function.snapshot_and_restore(parallelism=3)
    assert function.state["spent"] == {"ann": 3}
    assert function.process({"user": "ann", "price": 4, "at": "2024-01-01 12:02"}) == [{"user": "ann", "spent": 7}]


def test_the_result_does_not_depend_on_where_batches_are_cut():
    testing.check_cuts(
        env, {"orders": [{"user": "ab"[i % 2], "price": i, "at": f"2024-01-01 12:00:{i:02d}"} for i in range(20)]}
    )
"""

ORDERS: Final = """\
{"user": "ann", "price": 3, "at": "2024-01-01T12:00:00"}
{"user": "bob", "price": 5, "at": "2024-01-01T12:01:00"}
{"user": "ann", "price": 4, "at": "2024-01-01T13:02:00"}
"""

README: Final = """\
# @NAME@

| file | what it is |
|---|---|
| `@NAME@.py` | the job: where rows come from, what is done with them, where they go |
| `test_@NAME@.py` | its tests; they take milliseconds, because nothing is started |
| `orders/` | some rows to begin with |

```sh
pytest                                            # the tests
midstream simulate @NAME@.py                      # the whole job through failures, in seconds; nothing is written
midstream run @NAME@.py --preview 20              # the first rows of what comes out; nothing is written
midstream run @NAME@.py --slots process           # the whole job, on plain processes
midstream run @NAME@.py                           # the whole job, on Spark
```
"""


def _unfit(name: str) -> str:
    """Return why a file of that name could not be imported by its test; "" if it can."""
    if not _NAME.fullmatch(name):
        return "use letters from a to z, digits and underscores, and begin with a letter"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return "it is a Python keyword"
    if name.lower() in _TAKEN or name.lower().startswith("test_"):
        return "pytest, Python or the operating system treat a file of that name specially"
    if any(each in sys.stdlib_module_names or _is_installed(each) for each in {name, name.lower()}):
        return "a module of that name exists already, and could no longer be imported"
    return ""


def _is_installed(name: str) -> bool:
    """Whether a module of that name can be imported from anywhere but the current directory."""
    here = os.getcwd()
    paths = [path for path in sys.path if path and os.path.abspath(path) != here]
    return PathFinder.find_spec(name, paths) is not None


def create_project(name: str) -> Answer:
    """Create the job. Raises ConfigError for a name that is not a module name, or is taken, or exists already."""
    why = _unfit(name)
    if why:
        raise ConfigError(f"{name!r} cannot be the name of a job's file, which is imported: {why}")
    directory = Path(name)
    files = {f"{name}.py": JOB, f"test_{name}.py": TEST, "README.md": README, "orders/sample.jsonl": ORDERS}
    try:
        directory.mkdir()
        (directory / "orders").mkdir()
        for file, text in files.items():
            with open(directory / file, "x", encoding="utf-8") as opened:
                opened.write(text.replace("@NAME@", name))
    except FileExistsError:
        raise ConfigError(f"{directory} exists already; give another name, or remove it first") from None
    except OSError as error:
        raise StorageError(f"{directory}: cannot be written: {error.strerror}") from error
    paths = [str(directory / file) for file in files]
    lines = [f"wrote {path}" for path in paths]
    return Answer(NewFiles(tuple(paths)), Text(printable("\n".join([*lines, f"next: cd {name} && pytest"]))))
