"""Settings of an Environment that hardly any job changes."""

from __future__ import annotations

from dataclasses import dataclass

from midstream.engine.core.config import Duration, Size


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Sizes and limits of the engine, for `Environment(tuning=…)`. The defaults are right for almost all jobs.

    `queue_time`: how long rows should wait between two tasks at most, as far as batches of that size allow. Queues
    before a slow task are kept that short, so that a checkpoint has little to wait for, or to store; None fills the
    buffers. On a busy machine it is longer, by as much as slots wait for a core.
    `buffer_size`, `pool_size`: the size of a network buffer, and of all buffers of one slot.
    `batch_rows`: the maximum number of rows in a batch of a source; smaller batches make the job slower.
    `slot_timeout`: how long the job waits for its slots.
    `heartbeat_timeout`: a slot that is silent for longer is lost.

    An impossible value is refused by the Environment.

        >>> Environment("visits", tuning=Tuning(pool_size="256 MiB", slot_timeout="5 min"))
        Environment('visits', 0 operators)
    """

    queue_time: Duration | None = "10 ms"
    buffer_size: Size = "32 KiB"
    pool_size: Size = "128 MiB"
    batch_rows: int = 131_072
    slot_timeout: Duration = "60 s"
    heartbeat_timeout: Duration = "30 s"
