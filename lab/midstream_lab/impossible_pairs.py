"""All state machines that coverage records, and their impossible pairs of state and event, with the reasons."""

from __future__ import annotations

from typing import Final

from midstream.engine.checkpoint.barrier_handler import BARRIER_TABLE, Alignment
from midstream.engine.coordinator.checkpoints.commit_queue import COMMIT_TABLE
from midstream.engine.coordinator.checkpoints.pending_checkpoint import CHECKPOINT_TABLE, CheckpointProgress
from midstream.engine.coordinator.job_phase import PHASE_TABLE, Phase
from midstream.engine.coordinator.placement.attempt import TASK_PHASE_TABLE, TaskPhase
from midstream.engine.coordinator.placement.rescale import RESCALE_TABLE
from midstream.engine.coordinator.requests.savepoints import SAVEPOINT_TABLE, SavepointStage
from midstream.engine.protocol import messages as m
from midstream.engine.worker.slot_machine import SLOT_TABLE, SlotState
from midstream.engine.worker.task import TASK_TABLE
from midstream_lab.watched_machines import (
    COORDINATOR_EVENTS,
    ELEMENTS,
    NOT_PUBLISHED,
    RESCALE_STATES,
    TASK_STATES,
    Machine,
    Request,
    barrier_row,
    classes_of,
    machine_of,
    names_of,
    watch_attempt_tasks,
    watch_barriers,
    watch_channels,
    watch_checkpoints,
    watch_coordinator,
    watch_requests,
    watch_rescales,
    watch_savepoints,
    watch_slots,
    watch_tasks,
)

_FROM_TASKS: Final = "|".join(
    name
    for name in classes_of(m.FromSlot)
    if name not in ("Register", "SlotStatus", "InCall", "CommitDone", "CommitFailed")
)
_COMMITS: Final = "CommitDone|CommitFailed"
_AFTER_START: Final = (
    "TaskRunning|TaskEndOfData|TaskFinished|TaskFailed|CheckpointAck|CheckpointDecline|RequestSplit|SourceProgress"
)
_REQUESTS: Final = (*classes_of(m.ClientRequest), "CancelRequested")
_TIMERS: Final = "|".join(name for name in COORDINATOR_EVENTS if name.startswith("timer") and name != "timer end")
_IO_LATER: Final = "|".join(
    name
    for name in COORDINATOR_EVENTS
    if name.endswith((" done", " failed")) and not name.startswith(("open", "savepoint-location"))
)
_SETTLED_BEFORE: Final = "commit done|commit failed|abort done|abort failed"
_PUBLISHED: Final = "|".join(("published", *(f"not published: {kind}" for kind in NOT_PUBLISHED)))
_NOT_LIVE: Final = "CREATED|FINISHED|CLOSED"
_ALL_EMITTED: Final = "AWAITS_CHECKPOINT|AWAITS_SINKS|AWAITS_SENT"
_AFTER_DATA: Final = "rows|Watermark|WatermarkStatus|EndOfData"

MACHINES: Final[tuple[Machine, ...]] = (
    Machine(
        "barrier handler",
        names_of(Alignment),
        watch_barriers,
        (
            (
                "*",
                "TriggerReceived, over|TriggerReceived, newer",
                "it comes once, in sequence, while nothing is pending",
            ),
        ),
        BARRIER_TABLE,
        barrier_row,
    ),
    Machine(
        "task",
        TASK_STATES,
        watch_tasks,
        (
            (_NOT_LIVE, "|".join(ELEMENTS), "only a live task reads"),
            (f"EMITTING_LAST|{_ALL_EMITTED}", _AFTER_DATA, "all its data has ended"),
            (f"RUNNING|PAUSED|EMITTING_LAST|{_ALL_EMITTED}|FINISHED|CLOSED", "open|start", "it happens once"),
            ("PAUSED", "|".join(ELEMENTS), "it has a source and no gates"),
            ("CREATED", "trigger_checkpoint|checkpoint_completed|checkpoint_aborted", "all tasks run before the first"),
            ("CREATED", "fail", "a failure to open is the slot's"),
            ("CREATED", "add_split|no_more_splits|stop_source", "sent after Start, in sequence"),
            (f"{_ALL_EMITTED}|FINISHED", "add_split", "a source that requests splits has not ended"),
            ("FINISHED|CLOSED", "fail", "nothing of it runs any more"),
        ),
    ),
    Machine(
        "slot",
        names_of(SlotState),
        watch_slots,
        (
            ("DEPLOYING|DEPLOYED|RUNNING", "Welcome", "it comes first"),
            ("DEPLOYING|DEPLOYED|RUNNING", "Deploy", "the attempt before is cancelled first"),
            ("IDLE|DEPLOYING", "Start", "all slots have answered Deployed by then"),
            ("RUNNING", "Start", "it comes once"),
            (
                "DEPLOYING|DEPLOYED",
                "TriggerCheckpoint|CheckpointCompleted|CheckpointAborted|AssignSplit|DriftCeiling|NoMoreSplits|StopSources",
                "sent after Start, in sequence",
            ),
            ("DEPLOYING", "SplitsAssigned", "all slots have answered Deployed by then"),
        ),
    ),
    Machine(
        "coordinator",
        names_of(Phase),
        watch_coordinator,
        (
            (
                "OPENING|WAITING_TO_DEPLOY|DEPLOYING|STARTING|RUNNING|CANCELLING|ENDING|ENDED",
                "Started",
                "it comes first",
            ),
            ("CREATED", "|".join(e for e in COORDINATOR_EVENTS[1:] if e not in _REQUESTS), "Started comes first"),
            (
                "OPENING",
                f"SlotConnected|SlotLost|SlotRequestFailed|SlotStatus|InCall|{_COMMITS}|{_FROM_TASKS}",
                "no slot is requested yet",
            ),
            (
                "OPENING",
                f"{_TIMERS}|{_IO_LATER}",
                "nothing but opening, and directories of savepoints that are requested early, is under way",
            ),
            ("WAITING_TO_DEPLOY|DEPLOYING|STARTING|RUNNING|CANCELLING", "open done|open failed", "it has been opened"),
            (
                "WAITING_TO_DEPLOY",
                _FROM_TASKS,
                "no attempt yet, or all slots have sent Cancelled, the last of their messages",
            ),
            ("DEPLOYING", _AFTER_START, "sent after Start"),
            ("STARTING", "CheckpointAck|CheckpointDecline", "nothing has been triggered"),
            ("STARTING|RUNNING", "Deployed|DeployFailed|Cancelled", "all slots have answered"),
            ("DEPLOYING", "Cancelled", "nothing was cancelled"),
            ("RUNNING", "TaskRunning", "all tasks have reported it"),
            ("ENDING", f"SlotStatus|InCall|{_COMMITS}|{_FROM_TASKS}", "all slots have been released"),
            ("DEPLOYING|STARTING", _COMMITS, "deploying waits for them"),
            ("ENDED", "*", "its shell hands it no more events"),
            ("ENDING", _TIMERS, "all other timers are cancelled"),
            (
                "OPENING|WAITING_TO_DEPLOY|DEPLOYING|STARTING|RUNNING|CANCELLING",
                "timer end",
                "it is set when the job ends",
            ),
            ("DEPLOYING|STARTING", "timer checkpoint", "one that outlives its attempt is waited for before"),
            ("WAITING_TO_DEPLOY|DEPLOYING|CANCELLING", "timer symptom", "of an attempt that runs"),
            ("WAITING_TO_DEPLOY|DEPLOYING|STARTING|RUNNING", "timer cancel", "of an attempt that is being cancelled"),
            ("DEPLOYING|STARTING|RUNNING", "timer restart", "deploying waits for it, or ends it"),
            ("DEPLOYING|STARTING", "timer slots", "deploying waits for it, or ends it"),
            ("DEPLOYING|STARTING", f"timer commit|{_SETTLED_BEFORE}", "deploying waits for their outcome"),
            ("WAITING_TO_DEPLOY|DEPLOYING|STARTING|RUNNING|CANCELLING", "close done", "sources are closed at the end"),
        ),
    ),
    machine_of(TASK_TABLE),
    machine_of(SLOT_TABLE),
    Machine("task, to the coordinator", names_of(TaskPhase), watch_attempt_tasks, table=TASK_PHASE_TABLE),
    machine_of(PHASE_TABLE),
    machine_of(CHECKPOINT_TABLE),
    machine_of(COMMIT_TABLE),
    machine_of(SAVEPOINT_TABLE),
    machine_of(RESCALE_TABLE),
    Machine(
        "checkpoint",
        names_of(CheckpointProgress),
        watch_checkpoints,
        (
            ("COLLECTING|PUBLISHING|ORPHANED", "trigger", "one at a time"),
            ("NONE", "acknowledge|acknowledge again|decline|expired", "they belong to one in progress"),
            ("NONE|COLLECTING", _PUBLISHED, "it is not being published"),
            ("PUBLISHING|ORPHANED", "acknowledge", "all have answered"),
            ("*", "acknowledge again", "a task answers once, on a connection without duplicates"),
            ("PUBLISHING|ORPHANED", "decline", "a task answers once"),
            ("COLLECTING|PUBLISHING|ORPHANED", "rescale", "between two attempts, and only when its outcome is known"),
        ),
    ),
    Machine(
        "savepoint",
        names_of(SavepointStage),
        watch_savepoints,
        (
            (
                "WAITING|MAKING_CHECKPOINT|AWAITS_COMMITS|COPYING|COPIED|DISCARDING",
                "claimed|not claimed",
                "it comes first, once",
            ),
            (
                "CLAIMING|WAITING|MAKING_CHECKPOINT|AWAITS_COMMITS|COPIED|DISCARDING",
                "copied|not copied",
                "what is copied stays until then",
            ),
            (
                "CLAIMING|WAITING|MAKING_CHECKPOINT|AWAITS_COMMITS|COPYING|COPIED",
                "not discarded",
                "nothing is given back",
            ),
            ("WAITING|MAKING_CHECKPOINT|AWAITS_COMMITS|COPYING|COPIED", "discarded", "nothing is given back"),
            ("WAITING", "refuse", "a failure before its checkpoint only delays it"),
            ("DISCARDING", "refuse", "it has been"),
        ),
    ),
    Machine(
        "rescale",
        RESCALE_STATES,
        watch_rescales,
        (
            (
                "NONE|PLANNING|REQUESTING_CHECKPOINT|DISTRIBUTING|READY_TO_SWITCH|SWITCHING",
                "gathered",
                "only slots that are requested are gathered",
            ),
            (
                "NONE|PLANNING|REQUESTING_SLOTS|REQUESTING_CHECKPOINT|DISTRIBUTING|SWITCHING",
                "switching",
                "it waits for its checkpoint",
            ),
            (
                "NONE|REQUESTING_SLOTS|REQUESTING_CHECKPOINT|DISTRIBUTING|READY_TO_SWITCH|SWITCHING",
                "planned|not planned",
                "it is planned first, once",
            ),
            ("PLANNING", "planned of another", "one plan at a time is made"),
            (
                "NONE|PLANNING|REQUESTING_SLOTS|REQUESTING_CHECKPOINT|READY_TO_SWITCH|SWITCHING",
                "distributed|not distributed",
                "it is distributed once",
            ),
            ("NONE|PLANNING|SWITCHING", "spare_slot_lost", "there are no spare slots"),
            (
                "PLANNING|REQUESTING_SLOTS|REQUESTING_CHECKPOINT|DISTRIBUTING|READY_TO_SWITCH",
                "running",
                "the tasks of before run all the time",
            ),
            (
                "PLANNING|REQUESTING_SLOTS|DISTRIBUTING|READY_TO_SWITCH|SWITCHING",
                "stored",
                "its checkpoint is not being made",
            ),
        ),
    ),
    Machine(
        "slot request",
        names_of(Request),
        watch_requests,
        (
            ("OPEN|CLOSED|LOST", "the connection is gone", "it breaks once, of a slot that has registered"),
            ("OPEN", "waited for the report|abandon", "no slot has registered"),
        ),
    ),
    Machine(
        "channel",
        ("remote: empty", "remote: data", "remote: empty and a part", "remote: data and a part", "local: empty")
        + ("local: data",),
        watch_channels,
        (
            ("local: empty|local: data", "buffer|event|event inside a batch", "they come by reference"),
            ("local: empty|remote: empty|remote: empty and a part", "take", "only what is ready is polled"),
            ("remote: empty and a part|remote: data and a part", "event", "only what overtakes cuts in"),
            ("remote: empty|remote: data", "event inside a batch", "there is no batch that it could be inside of"),
        ),
    ),
)
