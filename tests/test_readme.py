"""What README and docs say is so: the example runs, every command and every key is there."""

import asyncio
import contextlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import typer

from kvxfer.cli.main import app
from kvxfer.control.client import AsyncDecodeClient, AsyncPrefillClient
from kvxfer.decode.agent import DecodeAgent
from kvxfer.layout import Group, PoolLayout, Shard
from kvxfer.memory import HostMemory
from kvxfer.ops.config import DecodeConfig, OpsConfig, PrefillConfig, SecurityConfig, SlotConfig, TransportConfig
from kvxfer.prefill.agent import PrefillAgent
from kvxfer.transfer import EventKind, Reason

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def sockets(tmp_path: Path) -> Iterator[str]:
    """One prefill agent and two decode agents below this directory."""
    slots = SlotConfig(num_slots=2, slot_bytes=1 << 18)
    transport = TransportConfig(name="loopback")
    agents: list[PrefillAgent | DecodeAgent] = [
        PrefillAgent(PrefillConfig(socket_dir=f"{tmp_path}/prefill", slots=slots, transport=transport))
    ]
    for rank in range(2):
        config = DecodeConfig(
            socket_dir=f"{tmp_path}/decode-{rank}", dst_rank=rank, dst_world=2, slots=slots, transport=transport
        )
        agents.append(DecodeAgent(config))
    threads = [threading.Thread(target=agent.run) for agent in agents]
    for thread in threads:
        thread.start()
    yield str(tmp_path)
    for agent in agents:
        agent.stop()
    for thread in threads:
        thread.join()
    for agent in agents:
        agent.close()


def _namespace(**names: object) -> dict[str, Any]:
    """What a block of the README runs in; what it prints is kept in `shown`."""
    shown: list[tuple[object, ...]] = []
    return {"shown": shown, "print": lambda *values: shown.append(values), **names}


def test_example(sockets: str) -> None:
    layout, prefill, decode = (
        block.replace("/run/kvxfer", sockets) for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    )
    hand_over, between, rest = prefill.partition("ticket = client.ticket()")
    submit, before_wait, wait = (between + rest).partition("print(")
    source = _namespace()
    exec(layout + hand_over, source)
    for layer, token, value in ((0, 0, 1), (1, 501, 2), (3, 999, 3)):
        row = layer * 40 * 64 + token  # its pages are in order
        source["pool"].array[row * 1152 : (row + 1) * 1152] = value
    exec(submit, source)
    ranks = [_namespace(rank=rank, ticket_text=source["ticket_text"]) for rank in range(2)]
    threads = [threading.Thread(target=exec, args=(layout + decode, rank)) for rank in ranks]
    for thread in threads:
        thread.start()
    exec(before_wait + wait, source)
    for thread in threads:
        thread.join()
    assert source["shown"] == [(EventKind.SENT,)]
    assert [rank["shown"] for rank in ranks] == [[(EventKind.LANDED, (b"first token: 42",))]] * 2
    for rank, layer, page, row, value in ((0, 0, 7, 0, 1), (1, 1, 5, 250 - 3 * 64, 2), (1, 3, 19, 499 - 7 * 64, 3)):
        start = ((layer * 20 + page) * 64 + row) * 1152
        assert (ranks[rank]["pool"].array[start : start + 1152] == value).all(), (rank, layer, page)
    for namespace in (source, *ranks):
        namespace["client"].close()
        namespace["pool"].close()


def _rows(pool: HostMemory, group: Group) -> npt.NDArray[np.uint8]:
    """`[num_layers, num_pages, page_tokens, row_bytes]` of a group whose pages lie one behind the other."""
    rows = pool.array[group.base_offset_bytes : group.extent_bytes]
    return rows.reshape(group.layers.num_layers, group.num_pages, group.page_tokens, group.row_bytes)


def _check_three_groups(layout: PoolLayout, src: HostMemory, dst: HostMemory, dst_layout: PoolLayout) -> None:
    """What the example of three groups must have moved to a rank's pool."""
    rank = dst_layout.shard.rank
    kv, draft, state = (_rows(src, group) for group in layout.groups)
    dst_kv, dst_draft, dst_state = (_rows(dst, group) for group in dst_layout.groups)
    sent_kv = np.concatenate((kv[:, 4], kv[:, 9]), axis=1)[:, :100]
    assert (dst_kv[:, 5, :50] == sent_kv[:, rank::2]).all()
    sent_draft = np.concatenate((draft[:, 7], draft[:, 2]), axis=1)[:, :100]
    assert (np.concatenate((dst_draft[:, 1], dst_draft[:, 6]), axis=1)[:, :100] == sent_draft).all()
    whole, split = np.split(state[0, 3, 0], 2)
    assert (dst_state[0, 0, 0] == np.concatenate((whole, np.split(split, 2)[rank]))).all()


def test_the_asyncio_example_of_three_groups(sockets: str) -> None:
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    names = _namespace()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        exec(block.replace("/run/kvxfer", sockets), names)

    async def workers() -> None:
        router: asyncio.Queue[str] = asyncio.Queue()
        prefill = asyncio.create_task(names["prefill_worker"](router))
        ticket_text = await router.get()
        await asyncio.gather(prefill, *(names["decode_worker"](rank, ticket_text) for rank in range(2)))

    async def bytes_of_all_groups() -> None:
        shards = (Shard(), Shard(rank=0, size=2), Shard(rank=1, size=2))
        layouts: list[PoolLayout] = [names["three_groups"](10, 4, shard) for shard in shards]
        async with contextlib.AsyncExitStack() as stack:
            pools = [HostMemory.create(layout.groups[-1].extent_bytes, "pool") for layout in layouts]
            for pool in pools:
                stack.callback(pool.close)
            pools[0].array[:] = np.random.default_rng(0).integers(0, 256, pools[0].num_bytes, dtype=np.uint8)
            prefill = await AsyncPrefillClient.connect(f"{sockets}/prefill", pools[0], layouts[0])
            await stack.enter_async_context(prefill)
            router: asyncio.Queue[str] = asyncio.Queue()
            sending = asyncio.create_task(names["send"](prefill, router))
            ticket_text = await router.get()
            for rank, (pool, layout) in enumerate(zip(pools[1:], layouts[1:], strict=True)):
                decode = await AsyncDecodeClient.connect(f"{sockets}/decode-{rank}", pool, layout)
                async with decode:
                    assert await names["receive"](decode, ticket_text) is EventKind.LANDED
                _check_three_groups(layouts[0], pools[0], pool, layout)
            assert await sending is EventKind.SENT

    asyncio.run(workers())
    assert sorted(shown[0].value for shown in names["shown"]) == ["landed", "landed", "sent"]
    asyncio.run(bytes_of_all_groups())


def _commands() -> dict[str, set[str]]:
    """Options of each command, by its full name."""
    group: Any = typer.main.get_command(app)
    found: dict[str, set[str]] = {}
    for name, command in group.commands.items():
        below = {f"{name} {each}": sub for each, sub in getattr(command, "commands", {}).items()} or {name: command}
        for full_name, sub in below.items():
            found[full_name] = {option for parameter in sub.params for option in parameter.opts} - {"--help"}
    return found


def test_every_command_and_option_is_in_the_table() -> None:
    rows = {
        row[0]: row[1]
        for row in re.findall(r"^\| `kvxfer ([a-z ]+?)(?: --config FILE)?` (\|.*)$", README, re.MULTILINE)
    }
    commands = _commands()
    assert rows.keys() == commands.keys()
    for name, options in commands.items():
        assert {option for option in options if option not in rows[name]} - {"--config"} == set(), name


def test_every_event_and_reason_is_documented() -> None:
    text = (ROOT / "docs" / "client.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE)
    for word in (*EventKind, *Reason):
        assert rows.count(word.value) == 1, word


def test_links_lead_somewhere() -> None:
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).is_file(), f"{path.name}: {target}"


@pytest.mark.parametrize(
    "config", [PrefillConfig, DecodeConfig, SlotConfig, TransportConfig, SecurityConfig, OpsConfig]
)
def test_every_key_is_documented(config: type[msgspec.Struct]) -> None:
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for field in msgspec.structs.fields(config):
        if field.name in {"transport", "slots", "security", "ops", "options"}:
            assert f"[{field.name}]" in text or f".{field.name}]" in text
        elif isinstance(field.default, str | int | float) and field.default != "":
            default = msgspec.json.encode(field.default).decode()
            assert f"| `{field.name}` | `{default}` |" in text
        else:
            assert f"| `{field.name}` | " in text
