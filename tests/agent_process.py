"""One agent or one worker as a process of its own, for tests that kill it or weigh it.

`python agent_process.py agent ROLE CONFIG_JSON`: runs an agent until SIGTERM. Says, as one line of JSON, what it costs.
`python agent_process.py engine TRANSPORT`: imports what every agent needs, opens the engine alone and ends.
`python agent_process.py worker ROLE SOCKET_DIR LAYOUT_JSON TICKET_JSON`: attaches a worker, begins a transfer that
cannot end (a prefill worker submits its first page, a decode worker opens `TICKET_JSON`), then waits to be killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time


def _rss_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _age_s() -> float:
    """Seconds since this process began, imports included, without those that it was ready to run and had no core."""
    with open("/proc/self/stat", encoding="ascii") as file:
        started_ticks = int(file.read().rpartition(")")[2].split()[19])
    with open("/proc/self/schedstat", encoding="ascii") as file:
        waited_ns = int(file.read().split()[1])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_ticks / os.sysconf("SC_CLK_TCK") - waited_ns / 1e9


def _say(**facts: object) -> None:
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def run_agent(role: str, text: str) -> None:
    import msgspec

    from kvxfer.decode.agent import DecodeAgent
    from kvxfer.ops.config import DecodeConfig, PrefillConfig
    from kvxfer.prefill.agent import PrefillAgent
    from kvxfer.transports import exit_process

    agent: PrefillAgent | DecodeAgent
    if role == "prefill":
        agent = PrefillAgent(msgspec.json.decode(text, type=PrefillConfig))
    else:
        agent = DecodeAgent(msgspec.json.decode(text, type=DecodeConfig))
    signal.signal(signal.SIGTERM, lambda *_: agent.stop())
    _say(age_s=_age_s(), rss_bytes=_rss_bytes(), has_torch="torch" in sys.modules, endpoint=agent.endpoint)
    agent.run()
    agent.close()
    exit_process(0)


def run_engine(transport: str) -> None:
    import msgspec  # noqa: F401
    import zmq  # noqa: F401

    from kvxfer.transports import create_transport, exit_process

    engine = create_transport(transport, incarnation="yardstick")
    _say(age_s=_age_s())
    engine.close()
    exit_process(0)


def run_worker(role: str, socket_dir: str, layout_text: str, ticket_text: str) -> None:
    import msgspec

    from kvxfer.control.client import ChunkPages, DecodeClient, PrefillClient, ReceivePages
    from kvxfer.control.messages import Ticket
    from kvxfer.layout import PoolLayout
    from kvxfer.memory import HostMemory

    layout = msgspec.json.decode(layout_text, type=PoolLayout)
    memory = HostMemory.create(layout.groups[0].extent_bytes, "pool")
    page_tokens = layout.groups[0].page_tokens
    if role == "prefill":
        client = PrefillClient.connect(socket_dir, memory, layout)
        ticket = client.ticket()
        client.submit(ticket, {"kv": ChunkPages(0, page_tokens, [0])})
    else:
        ticket = msgspec.json.decode(ticket_text, type=Ticket)
        DecodeClient.connect(socket_dir, memory, layout).open(ticket, {"kv": ReceivePages(0, 2 * page_tokens, [0, 1])})
    _say(ticket=msgspec.json.encode(ticket).decode())
    signal.pause()


if __name__ == "__main__":
    if sys.argv[1] == "agent":
        run_agent(*sys.argv[2:])
    elif sys.argv[1] == "engine":
        run_engine(*sys.argv[2:])
    else:
        run_worker(*sys.argv[2:])
