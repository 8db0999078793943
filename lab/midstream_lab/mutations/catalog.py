"""Known bugs, put back on purpose: how good the simulator is at finding them.

Each mutation replaces a piece of the engine while it is applied. One that survives is a hole in the
simulator, unless it has no observable effect: those are listed apart, with the proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from midstream_lab.mutations import (
    barrier_mutations,
    combining_mutations,
    commit_mutations,
    content_mutations,
    coordination_mutations,
    days_mutations,
    drift_mutations,
    enriching_mutations,
    exchange_mutations,
    file_mutations,
    function_mutations,
    held_mutations,
    idleness_mutations,
    in_flight_mutations,
    local_disk_mutations,
    lookup_mutations,
    moving_mutations,
    on_disk_mutations,
    operator_mutations,
    program_mutations,
    recovery_mutations,
    request_mutations,
    running_mutations,
    savepoint_mutations,
    scaling_mutations,
    sink_mutations,
    slot_commit_mutations,
    split_mutations,
    state_mutations,
    table_mutations,
    timely_mutations,
    window_kind_mutations,
    window_mutations,
    worker_mutations,
)
from midstream_lab.mutations.mutation import Equivalent, Mutation

MUTATIONS: Final[Mapping[str, Mutation]] = {
    **barrier_mutations.MUTATIONS,
    **exchange_mutations.MUTATIONS,
    **in_flight_mutations.MUTATIONS,
    **content_mutations.MUTATIONS,
    **recovery_mutations.MUTATIONS,
    **program_mutations.MUTATIONS,
    **worker_mutations.MUTATIONS,
    **coordination_mutations.MUTATIONS,
    **savepoint_mutations.MUTATIONS,
    **moving_mutations.MUTATIONS,
    **scaling_mutations.MUTATIONS,
    **on_disk_mutations.MUTATIONS,
    **commit_mutations.MUTATIONS,
    **slot_commit_mutations.MUTATIONS,
    **sink_mutations.MUTATIONS,
    **file_mutations.MUTATIONS,
    **request_mutations.MUTATIONS,
    **split_mutations.MUTATIONS,
    **idleness_mutations.MUTATIONS,
    **drift_mutations.MUTATIONS,
    **state_mutations.MUTATIONS,
    **window_mutations.MUTATIONS,
    **table_mutations.MUTATIONS,
    **held_mutations.MUTATIONS,
    **running_mutations.MUTATIONS,
    **operator_mutations.MUTATIONS,
    **function_mutations.MUTATIONS,
    **enriching_mutations.MUTATIONS,
    **combining_mutations.MUTATIONS,
    **timely_mutations.MUTATIONS,
    **lookup_mutations.MUTATIONS,
    **window_kind_mutations.MUTATIONS,
    **days_mutations.MUTATIONS,
    **local_disk_mutations.MUTATIONS,
}
EQUIVALENT: Final[Mapping[str, Equivalent]] = {
    "sequence_not_checked": Equivalent(
        "the numbers of frames are not checked",
        "a number is compared, and used for nothing else; both ends count every frame of a channel by one, and a "
        "connection keeps the order of its frames or is lost, so that the comparison never fails",
    ),
    "credit_lost_on_attach": Equivalent(
        "credit that was announced before the connection is there is forgotten",
        "a link is attached in the step in which it is made, before its channels can announce any credit",
    ),
    "recovered_behind_live": Equivalent(
        "in a checkpoint during recovery, what is still to be recovered is stored after what has arrived since",
        "a gate requests rows when the last recovered batch has been taken; as long as any is left its channels are empty",
    ),
    "ends_without_finishing": Equivalent(
        "operators are not notified that all their input has ended",
        "none of the engine's has anything left then: what they still hold goes out with the last watermark, and the timers "
        "that they would cancel are cancelled in the same step",
    ),
    "end_of_data_before_the_last_rows": Equivalent(
        "a task sends the end of data as soon as its input has ended, before its last watermark has fired to the end",
        "a task that reads from other tasks gets the last watermark before the end of data, and fires all of it before it "
        "reads more; a task with a source has no operator that fires in slices, since those are keyed and begin a task",
    ),
    "rows_before_their_watermark": Equivalent(
        "an operator gets rows while a watermark that came before them is still firing",
        "operators that fire in slices are keyed, so they are the first of their task, and a task fires to the end before "
        "it reads more; those after them fire in one step, and have nothing pending when rows come",
    ),
    "first_stop_stays": Equivalent(
        "a second checkpoint with which the job stops or moves does not replace the one whose abort resumes the source",
        "the coordinator has one checkpoint in progress, and sends every slot the abort of the one before, or that its "
        "sources resume, on the connection on which the next trigger follows: a source that is triggered runs",
    ),
    "ends_while_the_last_batch_is_sent": Equivalent(
        "a task does not wait for the rest of a batch of which a part has been sent",
        "after its last batch waits the end of its data, which leaves the queue only when the whole batch has left, so "
        "that the queue is not empty before that",
    ),
    "late_acknowledgement_is_deleted": Equivalent(
        "files of an acknowledgement that comes after its checkpoint was given up are deleted, even if the outcome of a "
        "checkpoint is unknown",
        "metadata is written only once every task that takes part has acknowledged, and each of them does so once: no "
        "acknowledgement of a checkpoint of unknown outcome comes later, and what a later checkpoint refers to is of "
        "completed ones",
    ),
    "capture_behind_the_end": Equivalent(
        "a channel whose end has come continues to capture batches",
        "nothing comes after the end of a partition, so that nothing more is captured; the capture itself ends with the "
        "announcement of the end, and the next one finds the end in the queue or nothing to wait for",
    ),
    "valve_begins_again": Equivalent(
        "the valve of a task has not restored how far event time had come",
        "what the valve gives is offered to the first operator, or to the edges, which ignore a watermark that is not "
        "above the last one they were offered; that is restored, and is the mark that the valve would have begun with",
    ),
    "producer_of_channel_state": Equivalent(
        "rows in flight are stored as another producer's",
        "which subtask gets them back, and in which order, follows from their consumer, whether they had arrived and the "
        "number of the state that they were distributed from; the producer is named in messages only",
    ),
    "queue_limit_by_rows": Equivalent(
        "a producer counts rows that wait, not buffers, against the limit of a queue",
        "whether a step may start is checked again whenever something that waits is taken, and where nothing waits both "
        "counts are 0 and the limit is at least 1: output comes in the same order, after a longer wait at most",
    ),
    "newer_cancel_is_not_for_us": Equivalent(
        "that a newer checkpoint was cancelled does not end the alignment for the one before",
        "a newer one is triggered only when the one before is over for the coordinator, which has sent that to every slot; "
        "this message ends the alignment, and what is acknowledged before it arrives is ignored",
    ),
    "trigger_behind_the_end": Equivalent(
        "a task that has finished does not decline a trigger that was on its way",
        "that it has finished was reported on the same connection before, and the coordinator gives the checkpoint up when "
        "it gets that report; the decline arrives after it, for a checkpoint that is over",
    ),
    "epoch_behind_the_write": Equivalent(
        "whether a later coordinator has taken over is checked only once the metadata is written",
        "the check before it saves a write, and no more: a coordinator that is superseded between that check and its write "
        "leaves the same metadata, which does not count, under an id that nothing else gets",
    ),
    "finished_task_acknowledges": Equivalent(
        "a task that has finished acknowledges a checkpoint, with nothing in its state",
        "likewise: the acknowledgement comes for a checkpoint that is over, and names no files and no output",
    ),
}
