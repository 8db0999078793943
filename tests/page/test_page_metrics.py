"""The metrics as Prometheus itself reads them."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from midstream.engine.core.elements import MAX_WATERMARK_US
from midstream.engine.protocol.job_status import (
    AutoscaleStatus,
    BottleneckStatus,
    CheckpointStatus,
    FlowStatus,
    GaugeStatus,
    HeldBackStatus,
    JobStatus,
    RecoveryStatus,
    SubtaskStatus,
    WaitStatus,
)
from midstream.page.prometheus import STATES, metrics_text
from sample_status import NOW_MS, sample


def parsed(status: JobStatus, per_subtask: bool = False) -> dict[str, Metric]:
    found = list(text_string_to_metric_families(metrics_text(status, per_subtask)))
    assert len({family.name for family in found}) == len(found), "a family is there twice"
    return {family.name: family for family in found}


def values(status: JobStatus, name: str, label: str | None = None, per_subtask: bool = False) -> dict[str, float]:
    """Of each sample of that family, by that label."""
    family = parsed(status, per_subtask)[name]
    return {"" if label is None else sample.labels[label]: sample.value for sample in family.samples}


def full() -> JobStatus:
    """A status in which everything is there that there can be."""
    status = sample()
    subtasks = (SubtaskStatus(0, 10, 20, 0.9, 0.05, 1_000_000), SubtaskStatus(1, 30, 40, 0.6, 0.15, None))
    first, parse = status.vertices[0].operators
    counting = msgspec.structs.replace(
        parse, counters={"calls": 12.0, "sum": 0.5}, gauges={"queue.depth": GaugeStatus(1, 4, 5)}
    )
    read = msgspec.structs.replace(
        status.vertices[0],
        operators=(first, counting),
        subtasks=subtasks,
        recovering=(RecoveryStatus(0, 100, 40),),
        splits_ahead=3,
    )
    held = HeldBackStatus(0, "read", 1, "read-3", 1_357_023_600_000_000, 840_000_000)
    write = msgspec.structs.replace(status.vertices[1], held_back=held)
    return msgspec.structs.replace(
        status,
        flows=(msgspec.structs.replace(status.flows[0], watermark_us=1_357_023_600_000_000),),
        vertices=(read, write),
        bottleneck=BottleneckStatus(0, read.name, 0.9),
        waiting=(WaitStatus("a slot", 7_500),),
        checkpoints=(CheckpointStatus(4, "in_progress", NOW_MS - 1_500, 1_500, 0), *status.checkpoints),
        warnings=("late",),
        autoscale=AutoscaleStatus(1, 8, False, 2, 5, "the busiest slot works 99% of the time"),
    )


def test_every_family_has_a_name_a_kind_and_help_by_the_conventions():
    for family in parsed(full(), per_subtask=True).values():
        assert family.name.startswith("midstream_") and family.documentation.endswith(".")
        assert family.type in ("counter", "gauge")
        for one in family.samples:
            assert one.name.endswith("_total") == (family.type == "counter")
            assert {"job_name", "job_id"} <= one.labels.keys()
        if family.type == "gauge":
            assert not family.name.endswith(("_ms", "_count", "_percent"))
        else:
            assert all(one.value >= 0 for one in family.samples)


def test_the_values_are_those_of_the_status():
    status = full()
    assert values(status, "midstream_job_state", "state") == {state: float(state == "running") for state in STATES}
    assert values(status, "midstream_job_restarts") == {"": 1}
    assert values(status, "midstream_job_waiting_seconds") == {"": 7.5}
    assert values(status, "midstream_job_start_time_seconds") == {"": status.started_ms / 1000}
    assert values(status, "midstream_slot_memory_bytes", "slot") == {"0": 200 * 2**20, "1": 210 * 2**20}
    assert values(status, "midstream_slot_memory_limit_bytes", "slot") == {"0": 2**30, "1": 2**30}
    assert values(status, "midstream_slot_state_memory_bytes", "slot") == {"0": 30 * 2**20, "1": 40 * 2**20}
    assert values(status, "midstream_slot_state_disk_bytes", "slot") == {"0": 0, "1": 50 * 2**20}
    assert values(status, "midstream_operator_rows_in", "operator") == {
        "read": 0,
        "parse": 1_234_567,
        "write": 1_200_000,
    }
    assert values(status, "midstream_operator_rows_out", "operator") == {
        "read": 1_234_567,
        "parse": 1_200_000,
        "write": 0,
    }
    assert values(status, "midstream_checkpoints_completed") == {"": 3}
    assert values(status, "midstream_checkpoints_failed") == {"": 1}
    assert values(status, "midstream_checkpoint_in_progress_seconds") == {"": 1.5}
    assert values(status, "midstream_last_checkpoint_duration_seconds") == {"": 0.12}
    assert values(status, "midstream_last_checkpoint_state_bytes") == {"": 1_258_291}
    assert values(status, "midstream_last_checkpoint_timestamp_seconds") == {"": (NOW_MS - 4_880) / 1000}
    assert values(status, "midstream_task_busy_ratio", "task") == {"read": 0.75, "write": 0.2}
    assert values(status, "midstream_task_busy_max_ratio", "task") == {"read": 0.9}
    assert values(status, "midstream_task_backpressured_max_ratio", "task") == {"read": 0.15}
    assert values(status, "midstream_task_watermark_timestamp_seconds", "task") == {"read": 1_357_023_600}
    assert values(status, "midstream_task_to_recover_bytes", "task") == {"read": 60, "write": 0}
    assert values(status, "midstream_task_bottleneck", "task_name") == {"read → parse": 1}


def test_what_passes_an_edge_is_told_apart_by_edge_even_between_the_same_tasks():
    status = sample()
    assert values(status, "midstream_edge_rows", "edge") == {"0": 1_200_000}
    assert values(status, "midstream_edge_bytes", "target") == {"write": 96 * 2**20}
    assert values(status, "midstream_edge_batches", "source") == {"read": 1_500}
    late = FlowStatus(7, 560, 1)
    twice = msgspec.structs.replace(status, edges=(*status.edges, (0, 1, "rebalance")), flows=(*status.flows, late))
    assert values(twice, "midstream_edge_rows", "edge") == {"0": 1_200_000, "1": 7}
    assert values(twice, "midstream_edge_rows", "partitioning") == {"keyed": 1_200_000, "rebalance": 7}
    assert values(full(), "midstream_edge_watermark_timestamp_seconds", "edge") == {"0": 1_357_023_600}
    assert values(full(), "midstream_task_watermark_held_back_seconds", "task") == {"write": 840}
    assert values(full(), "midstream_task_splits_ahead", "task") == {"read": 3, "write": 0}


def test_the_parallelism_of_a_job_that_scales_itself_is_there_beside_what_it_wants():
    assert values(full(), "midstream_job_parallelism") == {"": 2}
    assert values(full(), "midstream_job_parallelism_desired") == {"": 5}
    assert not [name for name in parsed(sample()) if name.startswith("midstream_job_parallelism")]


def test_metrics_of_functions_are_told_apart_by_a_label_and_need_no_family_each():
    assert values(full(), "midstream_user", "name") == {"calls": 12, "sum": 0.5}
    assert values(full(), "midstream_user", "operator") == {"parse": 0.5}
    assert values(full(), "midstream_user_value", "name") == {"queue.depth": 5}
    assert values(full(), "midstream_user_value_min", "name") == {"queue.depth": 1}
    assert values(full(), "midstream_user_value_max", "name") == {"queue.depth": 4}
    assert not [name for name in parsed(sample()) if "user" in name]


def test_subtasks_are_there_on_request_only():
    assert not [name for name in parsed(full()) if "subtask_" in name]
    assert values(full(), "midstream_subtask_rows_in", "subtask", per_subtask=True) == {"0": 10, "1": 30}
    assert values(full(), "midstream_subtask_busy_ratio", "subtask", per_subtask=True) == {"0": 0.9, "1": 0.6}
    assert values(full(), "midstream_subtask_watermark_timestamp_seconds", "subtask", per_subtask=True) == {"0": 1}


def test_what_is_not_known_is_left_out_and_not_0():
    status = sample()
    ended = msgspec.structs.replace(status.vertices[0], watermark_us=MAX_WATERMARK_US)
    without = msgspec.structs.replace(
        status,
        vertices=(ended,),
        edges=(),
        flows=(),
        last_checkpoint=None,
        checkpoints=(),
        slot_memory_bytes=(0,),
        slot_memory_limit_bytes=(0,),
        slot_state_memory_bytes=(),
        slot_state_disk_bytes=(),
    )
    names = parsed(without).keys()
    assert not [name for name in names if "watermark" in name or "last_checkpoint" in name or "memory" in name]
    assert not [name for name in names if "max_ratio" in name or "bottleneck" in name]
    assert values(without, "midstream_checkpoint_in_progress_seconds") == {"": 0}


@pytest.mark.parametrize("name", ['a"b', "a\\nb", "a\nb", "\\", 'x"} 1\nevil_total{a="', "größe → ★", "", " "])
def test_names_of_users_are_values_of_labels_whatever_is_in_them(name: str):
    status = msgspec.structs.replace(sample(), name=name)
    before = {family: len(metric.samples) for family, metric in parsed(sample()).items()}
    assert {family: len(metric.samples) for family, metric in parsed(status).items()} == before
    assert {one.labels["job_name"] for metric in parsed(status).values() for one in metric.samples} == {name}


def test_a_job_that_has_not_run_yet_has_metrics_too():
    status = msgspec.structs.replace(
        sample(), vertices=(), edges=(), flows=(), state="created", slots=0, slot_memory_bytes=()
    )
    assert values(status, "midstream_job_slots") == {"": 0}
