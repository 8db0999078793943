"""Accounts for rows in flight: each slot has one pool of buffers, which is divided into quotas.

Every batch in flight is charged here, in whole buffers, by its account. A quota has buffers that are reserved for it,
which no other quota can use: so a consumer can always continue, however much its producers have queued. All quotas
compete for the buffers that are not reserved.

`charge` never refuses: a step of a task always completes, even if its output overdraws the pool. The task checks
`available()` before it starts the next step.
"""

from __future__ import annotations

from collections.abc import Callable

from midstream.engine.core.errors import ConfigError, InvariantError
from midstream.engine.exchange.pool_minimum import too_small


class BufferPool:
    """The buffers of one slot: `total` of them, of `buffer_bytes` bytes each."""

    def __init__(self, total_bytes: int, buffer_bytes: int) -> None:
        self.buffer_bytes = buffer_bytes
        self.total = total_bytes // buffer_bytes
        self.in_use = 0
        self.shared_free = self.total
        """The free buffers among those that are not reserved. Negative while the pool is overdrawn."""
        self._quotas: list[Quota] = []
        self._waiting: dict[Callable[[], None], Quota] = {}

    def quota(self, name: str, reserved: int) -> Quota:
        """Add a quota. `check_capacity` must be called after the last one."""
        quota = Quota(self, name, reserved)
        self._quotas.append(quota)
        self.shared_free -= reserved
        return quota

    def check_capacity(self) -> None:
        """Raises ConfigError if the quotas reserve more buffers than the pool has."""
        needed = sum(quota.reserved for quota in self._quotas)
        if needed > self.total:
            raise ConfigError(too_small(needed, self.buffer_bytes, self.total * self.buffer_bytes))

    def buffers_for(self, size_bytes: int) -> int:
        """How many buffers are charged for `size_bytes` of data: at least one."""
        return -(-size_bytes // self.buffer_bytes) or 1

    def wake_when_available(self, quota: Quota, wake: Callable[[], None]) -> None:
        """Call `wake` once, when `quota` has buffers available."""
        self._waiting[wake] = quota

    def wake_waiting(self) -> None:
        """Wake every waiting task that may continue, after buffers were released or a queue has become shorter."""
        if self._waiting:
            for wake in [wake for wake, quota in self._waiting.items() if quota.available() > 0]:
                self._waiting.pop(wake, None)
                wake()

    def check(self) -> None:
        """Check that the buffers in use are those of all quotas, and that the free shared ones add up."""
        in_use = beyond = reserved = 0
        for quota in self._quotas:
            in_use += quota.in_use
            reserved += quota.reserved
            if quota.in_use > quota.reserved:
                beyond += quota.in_use - quota.reserved
        if self.in_use != in_use:
            raise InvariantError(
                f"pool: {self.in_use} in use, quotas hold {[(q.name, q.in_use) for q in self._quotas]}"
            )
        if self.shared_free != self.total - reserved - beyond:
            raise InvariantError(f"pool: shared free is {self.shared_free}, not {self.total - reserved - beyond}")


class Quota:
    """The share of one user of the pool. `reserved` buffers are its own."""

    __slots__ = ("in_use", "name", "pool", "reserved")

    def __init__(self, pool: BufferPool, name: str, reserved: int) -> None:
        self.pool = pool
        self.name = name
        self.reserved = reserved
        self.in_use = 0

    def available(self) -> int:
        """How many buffers can be charged without overdrawing the pool. If there are none it is 0 or less."""
        own = self.reserved - self.in_use
        shared = self.pool.shared_free
        return own + max(0, shared) if own > 0 else shared

    def free(self, buffers: int) -> None:
        if buffers > self.in_use:
            raise InvariantError(f"quota {self.name}: {buffers} buffers released, {self.in_use} in use")
        self.charge(-buffers)
        self.pool.wake_waiting()

    def charge(self, buffers: int) -> None:
        pool, beyond = self.pool, self.in_use - self.reserved
        self.in_use += buffers
        pool.in_use += buffers
        if beyond > 0:
            pool.shared_free += beyond
        if beyond + buffers > 0:
            pool.shared_free -= beyond + buffers
