"""A prefill worker to be killed: python -m tests.gpu.sharing_child SOCKET_DIR KIND.

Shares a pool of `KIND` with its agent, submits half of a transfer, says its ticket, and then does nothing.
"""

from __future__ import annotations

import signal
import sys

from kvxfer.control.codec import encode_ticket
from tests.gpu.shared_world import NUM_PAGES, Side, prefill_client, src_chunk


def main(socket_dir: str, kind: str) -> None:
    side = Side(kind, seed=3)
    with prefill_client(socket_dir, side) as client:
        ticket = client.ticket()
        client.submit(ticket, {"kv": src_chunk(0, NUM_PAGES // 2)})
        sys.stdout.write(encode_ticket(ticket) + "\n")
        sys.stdout.flush()
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
