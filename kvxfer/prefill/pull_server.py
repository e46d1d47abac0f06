"""The prefill agent's part in pulls: shares its worker's pool with decode agents of the same host."""

from __future__ import annotations

from kvxfer.control.pull_share import LeaseTable, PullListener
from kvxfer.sidecar import Sidecar


class PullServer:
    """Answers who asks for the pool. Owns the socket and the lease words; `close()` frees both."""

    def __init__(self, socket_dir: str, sidecar: Sidecar) -> None:
        """Listen at `{socket_dir}/pull.sock`. Raises `ConfigError`."""
        self.leases = LeaseTable()
        self._sidecar = sidecar
        self._listener = PullListener(socket_dir, sidecar.incarnation)
        self.path = self._listener.path
        sidecar.watch(self._listener, self.poll)

    def poll(self, now: float) -> None:
        """Answer who asks. Called when somebody does, and at every tick."""
        pool = self._sidecar.pool
        name, memory = (None, None) if pool is None else (pool.pool, pool.for_peers())
        for problem in self._listener.poll(name, memory, self.leases, now):
            self._sidecar.log.warning("refused to share the pool: %s", problem)

    def close(self) -> None:
        """Stop sharing; what is mapped elsewhere stays mapped there."""
        self._sidecar.unwatch(self._listener)
        self._listener.close()
        self.leases.close()
