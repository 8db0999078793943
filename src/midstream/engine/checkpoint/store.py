"""The checkpoint directory of one job: who may write to it, its contents, and what may be deleted.

    _job                    whose directory this is: the job's name
    epochs/00000007         coordinators number themselves; the highest one is the leader
    epochs/00000007.from    from what that coordinator resumed, and which checkpoints counted then
    chk-17/_owner           the epoch that makes checkpoint 17
    chk-17/_metadata        written last: without it there is no checkpoint 17
    chk-17/_dropped.00000007     the coordinator of that epoch is about to delete checkpoint 17
    shared/e7-a2-c17-v3-s0.state     state files, see `state_files`
    plans/…                 belongs to sources
    savepoints/…            see `savepoint`; nothing in it is ever deleted

Fencing. A coordinator that was replaced because it seemed dead may resume at any instruction. Every coordinator checks
the epochs before it publishes or deletes; it claims `_owner` exclusively, so it cannot overwrite what a later one has
published under the same id; and it checks the epochs again *after* publishing, before the checkpoint is reported. A
checkpoint may still be published between these checks. It is recognised as superseded, and never offered, because its
epoch is lower than the later coordinator's, and its id is not in the list that the later one wrote when it started
(`.from`). A
coordinator that rewinds to an older checkpoint and has sinks roll back newer output records this in the same way,
before the first sink does: from then on the newer checkpoints are superseded.

A deletion cannot be conditional, so a complete checkpoint is marked first (`_dropped`), and the epochs are checked
again after that. A later coordinator takes its epoch before it lists the checkpoints: either it finds the mark, and
begins without that checkpoint, or the marking coordinator finds the epoch, and deletes nothing. So a mark
does not count if a coordinator of a higher epoch has listed the checkpoint in its `.from`.

These small files carry a checksum each, with their own name in it.

Everything here blocks: for `RunIo` only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from midstream.engine.checkpoint.directory_records import (
    EpochFile,
    FromFile,
    JobDescriptor,
    OwnerFile,
    sealed,
    unsealed,
)
from midstream.engine.checkpoint.metadata import CheckpointMetadata, check_job, decode_metadata, encode_metadata
from midstream.engine.checkpoint.state_files import SHARED, StateFile
from midstream.engine.core.errors import StorageError
from midstream.engine.core.interfaces import Storage
from midstream.engine.core.urls import parted

EPOCHS_KEPT = 64
"""The number of recorded starts of a job: a coordinator that is suspended during more loses its last checkpoint."""

SAVEPOINT = "_savepoint"
"""The file that marks a savepoint's directory, which is read and copied, and never written to."""

_JOB = "_job"
_METADATA = "_metadata"
_EPOCHS = "epochs"
_EPOCH = re.compile(r"(\d{8})(\.from)?")
_CHECKPOINT = re.compile(r"chk-(\d+)")
_DROPPED = re.compile(r"_dropped\.(\d{8})")


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A checkpoint that was found: its metadata, or why it cannot be used."""

    checkpoint_id: int
    path: str
    metadata: CheckpointMetadata | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class RetainedCheckpoint:
    """The coordinator's record of a completed checkpoint on disk."""

    checkpoint_id: int
    files: frozenset[str]


@dataclass(frozen=True, slots=True)
class ClaimedDirectory:
    """The state of the directory when a coordinator becomes the leader. Nothing else has been changed yet."""

    epoch: int
    listed: tuple[ListedCheckpoint, ...]
    """The checkpoints, oldest first."""
    first: int = 0
    """The id from which this coordinator has recorded that it numbers its checkpoints; 0 before that."""


@dataclass(frozen=True, slots=True)
class LastStart:
    """From what a start resumed that has completed no checkpoint of its own."""

    source: int | None
    """The id of the checkpoint from which it resumed; None if it began at the beginning."""
    newer_output: Literal["keep", "rollback"] | None = None
    """What the user requested for output newer than that; None if there was none."""
    below: int = 0
    """The ids of the checkpoints of that output are lower than this one."""


@dataclass(frozen=True, slots=True)
class StartState:
    """The initial state of a coordinator."""

    epoch: int
    next_checkpoint_id: int
    restore: CheckpointMetadata | None
    retained: tuple[RetainedCheckpoint, ...]
    """The retained checkpoints, oldest first."""
    warnings: tuple[str, ...]


def checkpoint_path(checkpoint_id: int) -> str:
    return f"chk-{checkpoint_id}"


def metadata_path(checkpoint_id: int) -> str:
    return f"{checkpoint_path(checkpoint_id)}/{_METADATA}"


def is_metadata_path(path: str) -> bool:
    """Whether this is the path of a checkpoint's metadata within the directory of its job."""
    directory, _, name = path.partition("/")
    return name == _METADATA and _CHECKPOINT.fullmatch(directory) is not None


# ---- taking over -----------------------------------------------------------


def take_over(storage: Storage, root: str, job_name: str, job_id: str) -> ClaimedDirectory:
    """Claim the directory for this job and become its leader. `root` is the directory's URL. Raises StorageError."""
    if storage.exists(SAVEPOINT):
        raise StorageError(
            f"{root} holds a savepoint, which a job must not change: give another checkpoint directory, and start "
            f"from the savepoint with --from {root}"
        )
    claim_directory(storage, job_name)
    epoch = take_epoch(storage, job_id)
    return ClaimedDirectory(epoch, tuple(list_checkpoints(storage)))


def record_start(
    storage: Storage,
    taken: ClaimedDirectory,
    *,
    first: int,
    giving_up_after: int | None = None,
    fresh: bool,
    source: int | None = None,
    keeps: bool = False,
    rolls_back: bool = False,
) -> ClaimedDirectory:
    """Record, for later coordinators, from where this one resumes, which checkpoints count and where new ids begin;
    return those that count.

    `giving_up_after`: no checkpoint of earlier coordinators above that id counts. `first`: what `next_checkpoint_id`
    has returned since this coordinator took over. `source`, `keeps`, `rolls_back`: see `FromFile`.
    """
    newest = max((entry.checkpoint_id for entry in taken.listed), default=0)
    if giving_up_after is not None:
        newest = min(newest, giving_up_after)
    counting = tuple(entry for entry in taken.listed if entry.checkpoint_id <= newest)
    counted = tuple(entry.checkpoint_id for entry in counting)
    path = f"{_EPOCHS}/{taken.epoch:08}.from"
    storage.create(path, sealed(path, FromFile(newest, first, counted, source, fresh, keeps, rolls_back)))
    return ClaimedDirectory(taken.epoch, counting, first)


def begin(
    storage: Storage,
    taken: ClaimedDirectory,
    restore: CheckpointMetadata | None,
    newest_seen: int,
    warnings: tuple[str, ...],
) -> StartState:
    """Clean up after earlier coordinators, and begin. `newest_seen`: the newest checkpoint that is
    known, for example to a sink.

    An id that an earlier coordinator has claimed since this one recorded its first is skipped, and the claim stays.
    Without the claim, later coordinators would use the id, which its owner may still publish.
    """
    assert taken.first > 0, taken
    next_id = next_checkpoint_id(storage, newest_seen)
    usable = [entry.metadata for entry in taken.listed if entry.metadata is not None]
    warnings += clean_up(storage, taken.epoch, taken.listed, taken.first)
    return StartState(
        epoch=taken.epoch,
        next_checkpoint_id=next_id,
        restore=restore,
        retained=tuple(RetainedCheckpoint(m.checkpoint_id, frozenset(m.files)) for m in usable),
        warnings=warnings,
    )


def next_checkpoint_id(storage: Storage, newest_seen: int) -> int:
    """Return an id above every id that has been claimed, and may yet be published."""
    begun = (start.first - 1 for start in _starts(storage).values())
    return max([0, newest_seen, *begun, *_checkpoint_ids(storage)]) + 1


def claim_directory(storage: Storage, job_name: str) -> None:
    """Claim the directory for one job name. Raises StorageError if it is another job's."""
    storage.create(_JOB, sealed(_JOB, JobDescriptor(job_name)))
    check_owner(storage, job_name)


def check_owner(storage: Storage, job_name: str) -> None:
    """Raise StorageError if the directory is another job's."""
    owner = _job_name(storage) or job_name
    if owner != job_name:
        raise StorageError(
            f"this is the checkpoint directory of another job: of {owner!r}, not of {job_name!r}; "
            "give each job a directory of its own"
        )


def _job_name(storage: Storage) -> str | None:
    data = _read_if_there(storage, _JOB)
    return None if data is None else unsealed(data, JobDescriptor, _JOB).job


def take_epoch(storage: Storage, job_id: str) -> int:
    """Become the leader: take an epoch above all others, which fences them."""
    epoch = _highest_epoch(storage)
    while True:
        epoch += 1
        path = f"{_EPOCHS}/{epoch:08}"
        if storage.create(path, sealed(path, EpochFile(job_id))):
            return epoch


def check_epoch(storage: Storage, epoch: int, *, was_claimed: bool = False) -> None:
    """Raise StorageError if a later coordinator has taken over.

    `was_claimed`: this coordinator has claimed the epoch in this directory, so it must be there.
    """
    highest = _highest_epoch(storage)
    if highest > epoch:
        raise FencedError(
            f"another coordinator has taken over this job's checkpoint directory (its epoch is {highest}, "
            f"this one's {epoch}): the same job was started twice; this start ends"
        )
    if was_claimed and highest < epoch:
        raise StorageError(
            f"the checkpoint directory has lost the record of this start ({_EPOCHS}/{epoch:08}): it was emptied, moved or "
            "replaced, or its disk is no longer mounted. Nothing is committed until it is back; to continue elsewhere, "
            "cancel this start first"
        )


class FencedError(StorageError):
    """A later coordinator owns the directory: nothing more may be written or deleted."""


def _highest_epoch(storage: Storage) -> int:
    return max((int(match[1]) for name in storage.list(_EPOCHS) if (match := _EPOCH.fullmatch(name))), default=0)


# ---- listing checkpoints ---------------------------------------------------


def list_checkpoints(storage: Storage, newer_than: int = 0) -> list[ListedCheckpoint]:
    """List every checkpoint with metadata and an id above `newer_than`, oldest first, except those that are superseded
    or being deleted.
    """
    starts = _starts(storage)
    found = []
    for checkpoint_id in _checkpoint_ids(storage):
        if checkpoint_id <= newer_than:
            continue
        path = metadata_path(checkpoint_id)
        names = storage.list(checkpoint_path(checkpoint_id))
        if _METADATA not in names or _is_being_deleted(names, checkpoint_id, starts):
            continue
        data = _read_if_there(storage, path)  # a failed read is raised: the file is not damaged
        if data is None:
            continue
        try:
            metadata = decode_metadata(data, path)
            if metadata.checkpoint_id != checkpoint_id:
                raise StorageError(
                    f"{path}: holds checkpoint {metadata.checkpoint_id}; it may have been copied by hand"
                )
        except StorageError as error:
            epoch = _epoch_of(storage, checkpoint_id)
            if epoch is None or not _superseded(epoch, checkpoint_id, starts):
                found.append(ListedCheckpoint(checkpoint_id, checkpoint_path(checkpoint_id), None, str(error)))
            continue
        if not _superseded(metadata.epoch, checkpoint_id, starts):
            found.append(ListedCheckpoint(checkpoint_id, checkpoint_path(checkpoint_id), metadata))
    return found


def _checkpoint_ids(storage: Storage) -> list[int]:
    return sorted(int(match[1]) for name in storage.list("") if (match := _CHECKPOINT.fullmatch(name)))


def _starts(storage: Storage) -> dict[int, FromFile]:
    """Return what each coordinator recorded when it started, by epoch."""
    return {epoch: unsealed(data, FromFile, path) for epoch, path, data in _epoch_files(storage, ".from")}


def jobs_of(storage: Storage) -> dict[int, str]:
    """Return the ids of the starts of this directory's job, by epoch, as far back as they are remembered."""
    return {epoch: unsealed(data, EpochFile, path).job_id for epoch, path, data in _epoch_files(storage, None)}


def _epoch_files(storage: Storage, suffix: str | None) -> Iterator[tuple[int, str, bytes]]:
    for name in storage.list(_EPOCHS):
        match = _EPOCH.fullmatch(name)
        if match and match[2] == suffix:
            path = f"{_EPOCHS}/{name}"
            data = _read_if_there(storage, path)
            if data is not None:
                yield int(match[1]), path, data


def _read_if_there(storage: Storage, path: str) -> bytes | None:
    """Read a file; None if a running job has deleted it in the meantime."""
    try:
        return storage.read(path)
    except StorageError:
        if storage.exists(path):
            raise
        return None


def _epoch_of(storage: Storage, checkpoint_id: int) -> int | None:
    """Return the epoch that owns a checkpoint whose metadata cannot be read; None if that cannot be read either."""
    try:
        return _owner(storage, checkpoint_id)
    except StorageError:
        return None


def _owner(storage: Storage, checkpoint_id: int) -> int | None:
    path = f"{checkpoint_path(checkpoint_id)}/_owner"
    data = _read_if_there(storage, path)
    if data is None:
        return None
    return unsealed(data, OwnerFile, path).epoch


def is_superseded(storage: Storage, metadata: CheckpointMetadata) -> bool:
    """Whether a later coordinator began without this checkpoint of the directory: then it is never offered."""
    return _superseded(metadata.epoch, metadata.checkpoint_id, _starts(storage))


def _superseded(made_by: int, checkpoint_id: int, starts: Mapping[int, FromFile]) -> bool:
    """Whether a later coordinator began without this checkpoint.

    It may be older than the newest one that counted: its owner had abandoned it, and completed the next.
    """
    return any(epoch > made_by and checkpoint_id not in start.counted for epoch, start in starts.items())


def _is_being_deleted(names: Iterable[str], checkpoint_id: int, starts: Mapping[int, FromFile]) -> bool:
    """Whether a coordinator may delete this checkpoint at any moment. `names`: the files of its directory.

    One that marked it after a later coordinator, for which it counts, had taken its epoch does not: see `drop`.
    """
    marked_by = max((int(match[1]) for name in names if (match := _DROPPED.fullmatch(name))), default=0)
    counted_by = max((epoch for epoch, start in starts.items() if checkpoint_id in start.counted), default=0)
    return marked_by > 0 and marked_by >= counted_by


def was_rewound_past(storage: Storage, metadata: CheckpointMetadata) -> bool:
    """Whether a later coordinator has resumed from an older checkpoint.

    `metadata` may be a copy, of a checkpoint that this directory has retained no longer.
    """
    return any(
        epoch > metadata.epoch and metadata.checkpoint_id > start.newest for epoch, start in _starts(storage).items()
    )


def shows_committed(storage: Storage, listed: Iterable[ListedCheckpoint], metadata: CheckpointMetadata) -> bool:
    """Whether a newer one of these checkpoints shows that what `metadata` holds for sinks has been committed.

    One start made both, and the newer one no longer holds that output; or the newer one's start resumed from
    `metadata`, and committed that output first.
    """
    begun_here = {epoch for epoch, start in _starts(storage).items() if start.source == metadata.checkpoint_id}
    held = {(of.uid, of.checkpoint_id) for of in metadata.committables}
    return any(
        (newer.epoch in begun_here or newer.job_id == metadata.job_id)
        and held.isdisjoint((of.uid, of.checkpoint_id) for of in newer.committables)
        for entry in listed
        if (newer := entry.metadata) is not None and newer.checkpoint_id > metadata.checkpoint_id
    )


def begun_since(storage: Storage, newest: CheckpointMetadata | None) -> LastStart | None:
    """Return from what the last start resumed, if it has completed no checkpoint and did not simply resume from
    `newest`.

    `newest` is the newest checkpoint of the directory; None if there is none. A start that resumed from it is returned
    if it had to keep newer output, or to roll it back.
    """
    made_by, newest_id = (0, 0) if newest is None else (newest.epoch, newest.checkpoint_id)
    since = {epoch: start for epoch, start in _starts(storage).items() if epoch > made_by}
    last = since.get(max(since, default=0))
    if last is None or last.source is None:
        return LastStart(None) if last is not None and last.fresh else None
    begun = LastStart(last.source, "rollback" if last.rolls_back else "keep" if last.keeps else None, last.first)
    return None if last.source == newest_id and begun.newer_output is None else begun


def check_records(storage: Storage) -> list[str]:
    """Return what is wrong with the small files of the directory, whichever checkpoint is requested."""
    checks: list[Callable[[], object]] = [partial(check, storage) for check in (_job_name, jobs_of, _starts)]
    checks += [partial(_owner, storage, checkpoint_id) for checkpoint_id in _checkpoint_ids(storage)]
    problems = []
    for check in checks:
        try:
            check()
        except StorageError as error:
            problems.append(str(error))
    return problems


def load(storage: Storage, job_name: str | None, which: str) -> CheckpointMetadata:
    """Load the checkpoint that `which` names ("latest", an id, a path). `job_name` None: of any job.

    Raises StorageError if there is none or it cannot be used.
    """
    metadata = choose(list_checkpoints(storage), which, job_name, storage)
    if metadata is None:
        if storage.exists(SAVEPOINT):
            raise StorageError(
                "a savepoint was begun here and never completed, so there is nothing to start from: delete it, and make "
                "another one"
            )
        raise StorageError("no checkpoint has been completed here yet")
    return metadata


def choose(
    listed: Collection[ListedCheckpoint], which: str, job_name: str | None, storage: Storage
) -> CheckpointMetadata | None:
    """Choose from `listed`. None only for "latest" in a directory where no checkpoint was ever completed.

    Then nothing was ever committed either, and the job may begin at the beginning. If the newest checkpoint is damaged,
    "latest" is refused: what sinks have committed since an older one would be duplicated.
    """
    if which != "latest":
        return _by_name(listed, which, job_name, storage)
    problems: list[tuple[int, StorageError]] = []
    for entry in sorted(listed, key=lambda entry: -entry.checkpoint_id):
        try:
            found = _usable(entry, job_name, storage)
        except StorageError as error:
            problems.append((entry.checkpoint_id, error))
            continue
        if problems:
            (newest, why), *_ = problems
            raise StorageError(
                f"checkpoint {newest}, the newest, cannot be used: {why}. The newest usable one is "
                f"{found.checkpoint_id}. Restore the files from a copy of the directory; or go back, and say what happens "
                f"to the output that sinks have committed since then: --from {found.checkpoint_id} --newer-output "
                "rollback removes it, keep leaves it, and its rows are duplicated"
            )
        return found
    if problems and storage.exists(SAVEPOINT):
        raise StorageError(f"this savepoint cannot be used: {'; '.join(str(error) for _, error in problems)}")
    if problems:
        raise StorageError(
            f"none of the checkpoints can be used: {'; '.join(f'checkpoint {i}: {error}' for i, error in problems)}. "
            "Restore the directory from a copy, or start over with --fresh and other targets for the output"
        )
    return None


def _by_name(
    listed: Collection[ListedCheckpoint], which: str, job_name: str | None, storage: Storage
) -> CheckpointMetadata:
    name = parted(which)[0].rstrip("/").removesuffix("/_metadata").rsplit("/", 1)[-1]
    match = _CHECKPOINT.fullmatch(name)
    digits = match[1] if match else name
    if not digits.isascii() or not digits.isdigit():
        raise StorageError(f"{which!r} is not a checkpoint; write latest, a number, or the path of a chk-<number>")
    for entry in listed:
        if entry.checkpoint_id == int(digits):
            return _usable(entry, job_name, storage)
    existing = ", ".join(str(entry.checkpoint_id) for entry in listed) or "none"
    if any(map(_DROPPED.fullmatch, storage.list(checkpoint_path(int(digits))))):
        raise StorageError(f"checkpoint {digits} is being deleted; the checkpoint directory has: {existing}")
    raise StorageError(f"checkpoint {digits} is not in the checkpoint directory, which has: {existing}")


def _usable(entry: ListedCheckpoint, job_name: str | None, storage: Storage) -> CheckpointMetadata:
    """Return the metadata, if all files that it references exist. Raises StorageError.

    The state files' checksums are verified when they are read, before the first row is emitted.
    """
    if entry.metadata is None:
        raise StorageError(entry.error)
    if job_name is not None:
        check_job(entry.metadata, job_name, entry.path)
    for file in entry.metadata.files:
        if not storage.exists(file):
            raise StorageError(f"{entry.path}: its state file {file} is missing")
    return entry.metadata


def split_restore(which: str, root: str) -> tuple[str | None, str]:
    """Return the directory, other than `root`, that holds a checkpoint (None: `root`), and its name there.

    "latest", an id and "chk-<id>" are in `root`; a path is that of a checkpoint, of its metadata, or of a directory, of
    which it means the latest: a savepoint has just one.
    """
    if not which.strip("/") or which == "latest" or (which.isascii() and which.isdigit()):
        return None, which
    directory, parameters = parted(which)
    directory = directory.rstrip("/").removesuffix("/_metadata")
    name = "latest"
    if _CHECKPOINT.fullmatch(directory.rpartition("/")[2]):
        directory, _, name = directory.rpartition("/")
        if not directory:
            return None, name
    here, own = parted(root)
    is_here = directory.removeprefix("file://") == here.rstrip("/").removeprefix("file://")
    return (None if is_here and parameters in ("", own) else directory + parameters), name


# ---- publishing ------------------------------------------------------------


def publish(storage: Storage, metadata: CheckpointMetadata) -> str:
    """Publish the checkpoint, as the last step of making it, and return its path.

    If this raises, no `_metadata` of it remains, except with UnknownOutcomeError and FencedError, which means that a
    later coordinator has taken over, perhaps during this call.
    """
    check_epoch(storage, metadata.epoch, was_claimed=True)
    path = checkpoint_path(metadata.checkpoint_id)
    owner = f"{path}/_owner"
    if not storage.create(owner, sealed(owner, OwnerFile(metadata.epoch)), durable=False):
        check_epoch(storage, metadata.epoch)
        raise StorageError(f"{path} exists already, though it is not in the list of checkpoints")
    try:
        storage.write(metadata_path(metadata.checkpoint_id), [encode_metadata(metadata)])
    except Exception as error:
        try:
            storage.delete(path)
        except Exception as second:  # noqa: BLE001 - whatever a file system raises, the outcome is unknown
            raise UnknownOutcomeError(f"{path}: writing failed ({error}), and so did undoing it ({second})") from error
        raise
    try:
        check_epoch(storage, metadata.epoch)
    except FencedError:
        raise
    except StorageError as error:  # not undone: a newer leader may have resumed from it
        raise UnknownOutcomeError(
            f"{path} is written, but it cannot be determined whether it counts ({error})"
        ) from error
    return path


class UnknownOutcomeError(StorageError):
    """It is unknown whether this checkpoint will be restored: its files must be kept."""


# ---- deleting --------------------------------------------------------------


def drop(storage: Storage, epoch: int, checkpoints: Iterable[int], files: Iterable[str]) -> None:
    """Delete complete checkpoints, and then state files. No later coordinator begins with one of these checkpoints.

    Raises FencedError, with nothing deleted, if a later coordinator has taken over.
    """
    doomed = tuple(checkpoints)
    check_epoch(storage, epoch)
    if doomed:
        for checkpoint_id in doomed:
            storage.create(f"{checkpoint_path(checkpoint_id)}/_dropped.{epoch:08}", b"")
        check_epoch(storage, epoch)  # one that took over before the marks were made has not listed them
    _delete(storage, doomed, files)


def _delete(storage: Storage, checkpoints: Iterable[int], files: Iterable[str]) -> None:
    """Delete checkpoints, metadata first so that a torn one is never visible, then state files."""
    for checkpoint_id in checkpoints:
        storage.delete(metadata_path(checkpoint_id))
        storage.delete(checkpoint_path(checkpoint_id))
    for file in sorted(files):
        if StateFile.parse(file) is None:
            raise StorageError(f"refusing to delete {file!r}: it is not a state file")
        storage.delete(file)


def split_retained(
    retained: tuple[RetainedCheckpoint, ...], keep: int, in_use: Collection[str] = ()
) -> tuple[tuple[RetainedCheckpoint, ...], tuple[RetainedCheckpoint, ...], frozenset[str]]:
    """Keep the newest `keep`; return those kept, those to drop, and the files that nothing references afterwards.

    Files are counted by reference, not by the checkpoint that wrote them; `in_use` are files that something else, such
    as a checkpoint in progress, references.
    """
    ordered = tuple(sorted(retained, key=lambda r: r.checkpoint_id))
    cut = max(len(ordered) - keep, 0)
    dropped, kept = ordered[:cut], ordered[cut:]
    referenced = frozenset(in_use).union(*(r.files for r in kept))
    return kept, dropped, frozenset().union(*(r.files for r in dropped)) - referenced


def clean_up(storage: Storage, epoch: int, listed: Collection[ListedCheckpoint], first: int) -> tuple[str, ...]:
    """Delete state files of earlier epochs that no complete checkpoint references, and unfinished checkpoints.

    Of these only those below `first` are deleted, the id that this coordinator has recorded: one that takes over while
    they are deleted makes none of them. If any metadata cannot be read, nothing is deleted, since it may reference
    anything. Returns warnings.
    """
    unreadable = [entry.path for entry in listed if entry.metadata is None]
    if unreadable:
        return (f"leftover files are not deleted, because {', '.join(unreadable)} cannot be read",)
    referenced = {file for entry in listed if entry.metadata for file in entry.metadata.files}
    complete = {entry.checkpoint_id for entry in listed}
    check_epoch(storage, epoch)
    # No mark is needed: this coordinator has recorded which checkpoints count, and these do not.
    _delete(storage, [n for n in _checkpoint_ids(storage) if n < first and n not in complete], ())
    storage.sweep("", lambda name: _CHECKPOINT.fullmatch(name) is not None)
    _drop_state_files(storage, epoch, lambda file: file.epoch < epoch, referenced)
    for name in storage.list(_EPOCHS):
        match = _EPOCH.fullmatch(name)
        if match and int(match[1]) <= epoch - EPOCHS_KEPT:
            storage.delete(f"{_EPOCHS}/{name}")
    return ()


def drop_attempts_before(storage: Storage, epoch: int, attempt: int, referenced: Collection[str]) -> None:
    """Delete what earlier attempts of this epoch left unreferenced, such as a lost slot's unfinished checkpoint."""
    _drop_state_files(storage, epoch, lambda file: file.epoch == epoch and file.attempt < attempt, referenced)


def _drop_state_files(
    storage: Storage, epoch: int, unwanted: Callable[[StateFile], bool], referenced: Collection[str]
) -> None:
    """Delete all files that are `unwanted` and not `referenced`, and the remains of ones that were never finished."""

    def is_unwanted(name: str) -> bool:
        file = StateFile.parse(f"{SHARED}/{name}")
        return file is not None and unwanted(file)

    found = [f"{SHARED}/{name}" for name in storage.list(SHARED) if is_unwanted(name)]
    drop(storage, epoch, (), [file for file in found if file not in referenced])
    storage.sweep(SHARED, is_unwanted)
