"""A prefill worker whose pool others pull from: python -m tests.gpu.pulled_child SOCKET_DIR KIND.

Its own stream moves its rows. It says "ready", then for every line `SEED SHARE` it writes its pool, says its ticket,
waits for another line, submits that share of the pages, and, where that is all, says how the transfer has ended and how
many descriptors it has taken.
"""

from __future__ import annotations

import sys

from kvxfer.control.client import PrefillClient
from kvxfer.control.codec import encode_ticket
from tests.gpu.shared_world import LAYOUT, NUM_PAGES, WAIT_S, Side, contents, src_chunk

CHUNK_PAGES = 5


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(socket_dir: str, kind: str) -> None:
    side = Side(kind, seed=1)
    with PrefillClient.connect(socket_dir, side.memory, LAYOUT, placement="worker", timeout_s=WAIT_S) as client:
        say("ready")
        for line in sys.stdin:
            seed, share = line.split()
            side.write(contents(int(seed)))
            ticket = client.ticket()
            say(encode_ticket(ticket))
            sys.stdin.readline()
            end_page = int(NUM_PAGES * float(share))
            for first in range(0, end_page, CHUNK_PAGES):
                end = first + CHUNK_PAGES
                client.submit(ticket, {"kv": src_chunk(first, end)}, last=end == NUM_PAGES)
            if end_page == NUM_PAGES:
                event = client.wait(ticket, WAIT_S)
                say(f"{event.event.value} {event.stats.num_descriptors}")
    side.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
