"""The wires between a worker and its agent, and the core that they feed. Shared by both clients."""

from __future__ import annotations

import os
import time

from kvxfer.control.channel import REMOTE, WorkerConnection
from kvxfer.control.client_core import ClientCore
from kvxfer.control.handoff import HandoffConnection

_LAST_WORDS_S = 0.2


class AgentLink:
    """Channel and hand-over connection to one run of an agent. Owns both."""

    def __init__(self, socket_dir: str | os.PathLike[str], handoff: HandoffConnection) -> None:
        """Connect the channel; take over `handoff`."""
        self.core = ClientCore()
        self.handoff = handoff
        try:
            self.channel = WorkerConnection(socket_dir)
        except BaseException:
            handoff.close()
            raise

    def flush(self) -> None:
        """Send what the core wants sent, as far as the agent takes it; the rest goes another time."""
        outgoing = self.core.outgoing
        while outgoing and self.channel.send(REMOTE, outgoing[0]):
            outgoing.popleft()

    def drain(self) -> None:
        """Apply all that has arrived, then judge whether the agent still lives, then send what came of it.

        Only the end of the hand-over connection proves that the agent is gone and its pool quiet: an agent that is
        silent, stopped or confused may still touch pages.
        """
        gone = self.handoff.lost()
        while (received := self.channel.receive()) is not None:
            self.core.receive(received[1])
        if gone:
            self._hear_last_words()
            self.core.agent_lost("it has ended or hung up")
        self.flush()

    def _hear_last_words(self) -> None:
        """What an agent says before it ends travels another way than its end, and may be a moment behind."""
        until_s = time.monotonic() + _LAST_WORDS_S
        while self.core.open_transfers and time.monotonic() < until_s:
            received = self.channel.receive()
            if received is None:
                time.sleep(_LAST_WORDS_S / 50)
            else:
                self.core.receive(received[1])

    def close(self) -> None:
        """Close both wires: the agent takes the worker for gone. Calling it again does nothing."""
        self.core.close()
        self.channel.close()
        self.handoff.close()
