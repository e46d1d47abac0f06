"""What a source lends to those who pull: its pool and lease words, in memory that outlives its agent."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.simulation.executor import Copy, Operation, copies

if TYPE_CHECKING:
    from kvxfer.addresses import BlockAddresses
    from tests.simulation.pool import WorkerPool

NUM_LEASES = 3


class LeaseWords:
    """Lease words of one run of a prefill agent, as `PrefillCore` takes and revokes them."""

    def __init__(self) -> None:
        self.words = [0] * NUM_LEASES
        self._free = deque(range(NUM_LEASES))

    def take(self) -> tuple[int, int] | None:
        """A free word and its value."""
        if not self._free:
            return None
        word = self._free.popleft()
        self.words[word] += 1
        return word, self.words[word]

    def revoke(self, word: int) -> None:
        """What is pulled under the word from now on is void."""
        self.words[word] += 1
        self._free.append(word)


@dataclass(frozen=True, slots=True, eq=False)
class SharedPool:
    """A source's pool as a decode agent has mapped it."""

    pool: WorkerPool
    leases: LeaseWords

    def is_leased(self, lease: tuple[int, int]) -> bool:
        """Whether rows that were copied under the lease (word, value) count."""
        word, value = lease
        return self.leases.words[word] == value


@dataclass(slots=True, eq=False)
class PullOperation(Operation):
    """A pull of a whole chunk. `is_copied` once its rows have been read."""

    shared: SharedPool | None = None
    src_addresses: tuple[BlockAddresses, ...] = ()
    lease: tuple[int, int] = (0, 0)
    is_copied: bool = False

    def copies(self) -> list[Copy]:
        """Rows in this side's pool."""
        return self._copies(self.source.addresses)

    def src_copies(self) -> list[Copy]:
        """Rows in the source's pool, parallel to `copies`."""
        return self._copies(self.src_addresses)

    def _copies(self, addresses: tuple[BlockAddresses, ...]) -> list[Copy]:
        plan = self.source.plan
        return [copy for segment in range(plan.num_segments) for copy in copies(plan, addresses, segment)]
