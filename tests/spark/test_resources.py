"""What Spark assigns to the task of a slot reaches the functions of its subtasks."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pyspark

from midstream import Environment, testing
from midstream.engine.worker.interfaces import SlotServices
from midstream.inprocess import in_process_job
from midstream.runtime.process.slot_provider import SlotLaunch
from midstream.spark import spark_slots

SCHEMA = {"gpu": str}


class Where:
    def open(self, ctx: Any) -> None:
        self.gpu = ",".join(ctx.resources.get("gpu", ["none"]))

    def __call__(self, row: dict[str, str]) -> dict[str, str]:
        return {"gpu": self.gpu}


def test_functions_find_the_resources_of_their_slot() -> None:
    stream = Environment("doc").from_collection([{"gpu": ""}]).map(Where())
    assert testing.run(stream).rows == [{"gpu": "none"}]
    with patch.object(in_process_job, "SlotServices", partial(SlotServices, resources={"gpu": ["0", "3"]})):
        assert testing.run(stream).rows == [{"gpu": "0,3"}]


def test_a_slot_on_spark_has_the_resources_of_its_task() -> None:
    """As Spark reports them: a cluster with GPUs is not needed."""
    context: Any = object.__new__(pyspark.TaskContext)
    context._resources = {"gpu": pyspark.resource.ResourceInformation("gpu", ["1"])}
    launch: Any = SlotLaunch.__new__(SlotLaunch)
    object.__setattr__(launch, "log_levels", {})
    with (
        patch.object(pyspark.TaskContext, "get", lambda: context),
        patch.object(spark_slots, "run_slot") as run_slot,
        patch.object(spark_slots, "SlotOutput"),
    ):
        assert list(spark_slots._be_a_slot(launch, True, ())) == []
    assert run_slot.call_args.kwargs["resources"] == {"gpu": ["1"]}
    with patch.object(pyspark.TaskContext, "get", lambda: None):
        assert spark_slots._assigned() == {}
