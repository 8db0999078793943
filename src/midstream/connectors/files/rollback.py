"""The output that a file sink has committed, by checkpoint, and how it is rolled back.

Two things record it: the journal of each job, written when all files of a checkpoint are in place, and the names of the
files, which exist as soon as they are moved. Taking output back first deletes pending files, so that a driver that
resumes has nothing to move. Then it lowers the journals, so that such a driver cannot conclude that it has moved them.
It deletes committed files last. If it is killed in between, the next call finds the rest.

A driver that has moved its files by then may still write its journal, although they are deleted again. So a note next to
the journal shows up to which checkpoint that counts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

import pyarrow.fs
import xxhash

from midstream.connectors.common.filesystem import delete_if_there, make_directory, make_durable, names_in
from midstream.engine.core.errors import ConfigError, StorageError

JOURNAL: Final = "committed"
_LOWERED: Final = "lowered"
"""The suffix of a note next to a lowered journal: it no longer implies that files of exactly that checkpoint exist."""
_ENDED: Final = "ended"
"""The note of the checkpoint up to which a journal counts."""
ATTEMPTS_MAX: Final = 10_000
"""The number of attempts of a job that are tried: its files are recognised by a hash of job and attempt."""
_FILE = re.compile(r"part-(\d+)-\d+-\d+-([0-9a-f]{16})\.(?:parquet|jsonl)")
_PENDING = re.compile(r"\d+-\d+-\d+")
JOB_ID: Final = re.compile(r"[A-Za-z0-9_-]+")


def file_token(job_id: str, uid: str, attempt: int) -> str:
    """Return the part of a file's name that identifies its writer."""
    return xxhash.xxh3_64_hexdigest(f"{job_id}/{uid}/{attempt}".encode())


class CommittedFiles:
    """The files that one sink has committed in `jobs`.

    `is_shared`: other jobs write to the directory as well.
    """

    def __init__(
        self,
        filesystem: pyarrow.fs.FileSystem,
        directory: str,
        hidden: str,
        folder: str,
        uid: str,
        jobs: Collection[str],
        is_shared: bool,
    ) -> None:
        self._filesystem = filesystem
        self._directory = directory
        self._above = f"{hidden}/{folder}"
        self._folder = folder
        self._uid = uid
        self._jobs = sorted(jobs)
        self._is_shared = is_shared
        strange = [job for job in self._jobs if not JOB_ID.fullmatch(job)]
        if strange:
            raise StorageError(
                f"{strange[0]!r} is not the id of a job; the checkpoint directory has been tampered with"
            )

    def newest(self) -> int:
        journals = max((self._journal(job)[0] for job in self._jobs), default=0)
        files = self._files(journals) if self._is_shared else self._all_files(journals)
        return max((checkpoint_id for checkpoint_id, _ in files), default=journals)

    def check(self, after: int) -> None:
        """Raise ConfigError if files of checkpoints newer than `after` are missing, or are of unknown jobs."""
        ours = set(self._files(after))
        unknown = [] if self._is_shared else [name for each, name in self._all_files(after) if (each, name) not in ours]
        if unknown:
            raise ConfigError(
                f"{self._directory}/{unknown[0]} is newer than checkpoint {after}, and it is not known which job wrote it; "
                "move it elsewhere, or delete it"
            )
        there = {checkpoint_id for checkpoint_id, _ in ours}
        for job in self._jobs:
            journal, is_late = self._journal(job)
            if (
                journal > after
                and journal not in there
                and not is_late
                and not is_file(self._filesystem, f"{self._above}/{job}/{_LOWERED}")
            ):
                raise ConfigError(
                    f"the files of checkpoint {journal} are no longer in {self._directory}: they have been removed"
                )

    def roll_back(self, after: int, kept: Collection[str]) -> None:
        """Remove output newer than `after`. `kept`: the paths of pending files that must still be committed."""
        for job in self._jobs:
            for name in names_in(self._filesystem, f"{self._above}/{job}"):
                if _PENDING.fullmatch(name) and f"{self._folder}/{job}/{name}" not in kept:
                    delete_if_there(self._filesystem, f"{self._above}/{job}/{name}")
        for job in self._jobs:
            if self._journal(job)[0] > after:
                self._filesystem.open_output_stream(f"{self._above}/{job}/{_LOWERED}").close()
                write_journal(self._filesystem, f"{self._above}/{job}/{JOURNAL}", after)
            if not 0 <= self._read(job, _ENDED) <= after:
                make_directory(self._filesystem, f"{self._above}/{job}")
                write_journal(self._filesystem, f"{self._above}/{job}/{_ENDED}", after)
        for _, name in self._files(after):
            delete_if_there(self._filesystem, f"{self._directory}/{name}")
        if self._filesystem.get_file_info(self._directory).type == pyarrow.fs.FileType.Directory:
            make_durable(self._filesystem, self._directory)

    def _all_files(self, after: int) -> list[tuple[int, str]]:
        """Return committed files of checkpoints newer than `after`, of any job."""
        found = [match for name in names_in(self._filesystem, self._directory) if (match := _FILE.fullmatch(name))]
        return [(int(match[1]), match[0]) for match in found if int(match[1]) > after]

    def _files(self, after: int) -> list[tuple[int, str]]:
        """Return committed files of these jobs of checkpoints newer than `after`."""
        newer = self._all_files(after)
        unknown, ours = {_token_of(name) for _, name in newer}, set()
        for token in self._tokens():
            if not unknown:
                break
            if token in unknown:
                unknown.remove(token)
                ours.add(token)
        return [(checkpoint_id, name) for checkpoint_id, name in newer if _token_of(name) in ours]

    def _tokens(self) -> Iterator[str]:
        for attempt in range(ATTEMPTS_MAX):
            for job in self._jobs:
                yield file_token(job, self._uid, attempt)

    def _journal(self, job: str) -> tuple[int, bool]:
        """Return the newest checkpoint that a job has committed, and whether its journal was written too late to count."""
        journal = max(0, self._read(job, JOURNAL))
        ended = self._read(job, _ENDED) if journal else -1
        return (ended, True) if 0 <= ended < journal else (journal, False)

    def _read(self, job: str, name: str) -> int:
        return read_journal(self._filesystem, f"{self._above}/{job}/{name}", otherwise=-1)


def _token_of(name: str) -> str:
    return name.rpartition("-")[2].partition(".")[0]


def is_file(filesystem: pyarrow.fs.FileSystem, path: str) -> bool:
    return bool(filesystem.get_file_info(path).type == pyarrow.fs.FileType.File)


def read_journal(filesystem: pyarrow.fs.FileSystem, path: str, *, otherwise: int) -> int:
    """Return the checkpoint up to which a job has committed; `otherwise` if there is no such file."""
    if not is_file(filesystem, path):
        return otherwise
    with filesystem.open_input_stream(path) as stream:
        return int(stream.read())


def write_journal(filesystem: pyarrow.fs.FileSystem, path: str, checkpoint_id: int) -> None:
    with filesystem.open_output_stream(f"{path}.new") as stream:
        stream.write(str(checkpoint_id).encode())
    make_durable(filesystem, f"{path}.new")
    filesystem.move(f"{path}.new", path)
