"""A status as a job of two vertices would report it."""

from __future__ import annotations

import msgspec

from midstream.engine.protocol.job_status import (
    CheckpointStatus,
    FailureStatus,
    FlowStatus,
    JobStatus,
    OperatorStatus,
    VertexStatus,
)

NOW_MS = 1_700_000_060_000


def sample() -> JobStatus:
    """A job of two vertices in its second attempt, a minute old."""
    read = VertexStatus(
        id=0,
        name="read → parse",
        parallelism=2,
        states={"running": 2},
        operators=(
            OperatorStatus("read", "read", 2, 0, 1_234_567),
            OperatorStatus("parse", "parse [bold]x[/]", 2, 1_234_567, 1_200_000),
        ),
        watermark_us=1_357_023_600_000_000,
        busy=0.75,
        backpressured=0.10,
    )
    write = VertexStatus(
        id=1,
        name="write",
        parallelism=1,
        states={"running": 1},
        operators=(OperatorStatus("write", "write", 1, 1_200_000, 0),),
        watermark_us=None,
        busy=0.2,
        backpressured=0.0,
    )
    checkpoint = CheckpointStatus(3, "completed", NOW_MS - 5_000, 120, 1_258_291)
    return JobStatus(
        job_id="0123456789abcdef",
        name="flights",
        state="running",
        attempt=1,
        started_ms=NOW_MS - 60_000,
        now_ms=NOW_MS,
        slots=2,
        slots_needed=2,
        vertices=(read, write),
        edges=((0, 1, "keyed"),),
        checkpoints_completed=3,
        checkpoints_failed=1,
        last_checkpoint=checkpoint,
        checkpoints=(checkpoint,),
        failures=(
            FailureStatus(
                NOW_MS - 20_000,
                0,
                "operator 'parse': ValueError: bad row 17",
                'Traceback (most recent call last):\n  File "job.py", line 3, in parse\nValueError: bad row 17\n',
            ),
        ),
        restarts=1,
        restored_from=None,
        checkpoint_dir="/data/flights",
        slot_memory_bytes=(200 * 2**20, 210 * 2**20),
        slot_memory_limit_bytes=(2**30, 2**30),
        slot_state_memory_bytes=(30 * 2**20, 40 * 2**20),
        slot_state_disk_bytes=(0, 50 * 2**20),
        flows=(FlowStatus(1_200_000, 96 * 2**20, 1_500),),
    )


def later(status: JobStatus, seconds: float, rows: int) -> JobStatus:
    """The same job `seconds` on, every operator `rows` rows further."""
    vertices = tuple(
        msgspec.structs.replace(
            vertex,
            operators=tuple(
                msgspec.structs.replace(
                    op,
                    rows_in=op.rows_in + rows if op.rows_in else 0,
                    rows_out=op.rows_out + rows if op.rows_out else 0,
                )
                for op in vertex.operators
            ),
        )
        for vertex in status.vertices
    )
    flows = tuple(FlowStatus(flow.rows + rows, flow.bytes + 80 * rows, flow.batches + 10) for flow in status.flows)
    return msgspec.structs.replace(status, now_ms=status.now_ms + round(seconds * 1000), vertices=vertices, flows=flows)
