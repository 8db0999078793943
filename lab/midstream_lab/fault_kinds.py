"""The kinds of faults and requests that strike a job of the laboratory."""

from __future__ import annotations

from typing import Final

from midstream.simulation import faults

SAVEPOINTS: Final = ("savepoint", "stop_savepoint", "savepoint_fails", "savepoint_struck")
RARE: Final = ("go_back", "freeze_at_publish", "storage_lies")
"""Kinds that only `with_rare` draws."""
FAULTS: Final = (
    "kill_slot",
    "kill_slot_twice",
    "stop_slot",
    "cut_link",
    "cut_control",
    "kill_driver",
    "stop_driver",
    "publish_fails",
    "crash_at_publish",
    "write_fails",
    "disk_full",
    "user_error",
    "read_fails",
    "commit_fails",
    "slot_fails",
    "stop",
    "drain",
    "checkpoint",
    "slow_storage",
    "disk_gone",
    "open_fails",
    "cancel",
    "rescale",
    "rescale_struck",
    "drain_struck",
    "slots_late",
    *SAVEPOINTS,
    *RARE,
)
"""The kinds of faults and requests from which random scenarios are drawn; each kind below has a rule of its own."""
HANGS: Final = "publish_hangs"
LONG_CALL: Final = "long_call"
"""A kind that only `with_hangs` draws, as it does `HANGS`."""
STALLS: Final = "stall"
"""A kind that only `with_stalls` draws."""
KILL_ANOTHER: Final = "kill_another"
AT_IT: Final = (
    "kill_slot",
    KILL_ANOTHER,
    "cut_control",
    "kill_slot",
    KILL_ANOTHER,
    "rescale",
    "user_error",
    "stop",
    "kill_driver",
    "drain",
    "cancel",
    "stop_driver",
    "rescale_struck",
    "stop_savepoint",
)
"""The kinds that strike a job in the middle of a commit on a slot, that slot or another one.

Those before `stop` also strike a job without checkpoints.
"""
CLUSTER_GONE: Final = "cluster_gone"
"""A kind that only `with_cluster_gone` draws."""
LEAVING: Final = "slot_leaves"
"""A kind that only `with_leaving` draws."""
BACKLOGGED: Final = "strike_backlogged"
"""A kind that waits until much is in flight."""
COMMITTING: Final = "strike_committing"
"""A kind that waits until a slot is in the middle of a commit. Only `with_commits_on_slots` draws it."""
PUBLISH_LIES: Final = "publish_lies"
DELETE_FAILS: Final = "delete_fails"
UNREADABLE: Final = "strike_unreadable"
SAVEPOINT_SLOW: Final = "savepoint_slow"
"""Kinds that make one operation of the storage fail or take long. Only regions draw them."""
COMMIT_FROZEN: Final = "freeze_at_commit"
ROLLBACK_FROZEN: Final = "freeze_at_rollback"
DELETION_FROZEN: Final = "freeze_at_deletion"
ENDING: Final = "strike_ending"
PARTLY_FINISHED: Final = "strike_partly_finished"
TAKEN_RECOVERING: Final = "strike_taken_recovering"
"""Only regions draw these. The last three kill the driver as soon as a checkpoint of that kind is complete."""
LOADS_FAIL: Final = "loads_fail"
"""Only `with_commits_on_slots` and regions draw it."""
REQUESTS: Final = faults.REQUESTS | {"savepoint_fails", LEAVING, SAVEPOINT_SLOW}
"""The kinds that are requests and not faults: they do not excuse a failure."""
WITHOUT_CHECKPOINTS: Final = frozenset(
    ("kill_slot", "kill_slot_twice", "stop_slot", "cut_link", "cut_control", "user_error", "read_fails", "slot_fails")
    + ("open_fails", "checkpoint", "stop", "rescale", "slots_late", "savepoint", "stop_savepoint")
)
"""The kinds that a job without checkpoints survives: it starts over, commits at its end, and refuses requests."""
