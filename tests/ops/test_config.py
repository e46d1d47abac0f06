"""Configuration files: what is read, and one clear error for everything that is wrong."""

from pathlib import Path

import pytest

from kvxfer.errors import ConfigError
from kvxfer.ops.config import (
    MAX_SOCKET_NAME_BYTES,
    MAX_SOCKET_PATH_BYTES,
    DecodeConfig,
    PrefillConfig,
    SlotConfig,
    TransportConfig,
    dump_config,
    load_decode_config,
    load_prefill_config,
)


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "agent.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults(tmp_path: Path) -> None:
    path = _write(tmp_path, 'socket_dir = "/run/kvxfer"')
    assert load_prefill_config(path) == PrefillConfig(socket_dir="/run/kvxfer")
    assert load_decode_config(path) == DecodeConfig(socket_dir="/run/kvxfer")


def test_all_keys(tmp_path: Path) -> None:
    text = """
        socket_dir = "/run/kvxfer"
        listen_host = "::1"
        listen_port = 9000
        advertise_host = "prefill-0.example"
        mode = "raw"
        num_threads = 4
        peer_timeout_s = 2
        log_level = "debug"
        [transport]
        name = "mooncake"
        interface = "eth1"
        [transport.options]
        num_post_threads = 2
        [slots]
        num_slots = 4
        slot_bytes = 1048576
    """
    assert load_prefill_config(_write(tmp_path, text)) == PrefillConfig(
        socket_dir="/run/kvxfer",
        listen_host="::1",
        listen_port=9000,
        advertise_host="prefill-0.example",
        transport=TransportConfig(name="mooncake", interface="eth1", options={"num_post_threads": 2}),
        slots=SlotConfig(num_slots=4, slot_bytes=1 << 20),
        mode="raw",
        num_threads=4,
        peer_timeout_s=2.0,
        log_level="debug",
    )


@pytest.mark.parametrize(
    "config",
    [
        PrefillConfig(
            socket_dir='/a "b"\\c', transport=TransportConfig(options={"a": 1, "b": True, "c": 0.5, "d": "e"})
        ),
        PrefillConfig(socket_dir="/ä", slots=SlotConfig(num_slots=1, slot_bytes=4096), mode="serial"),
    ],
)
def test_dump_and_load(tmp_path: Path, config: PrefillConfig) -> None:
    assert load_prefill_config(_write(tmp_path, dump_config(config))) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "socket_dir: got nothing, expected a value"),
        ('socket_dir = ""', "socket_dir: got ''"),
        ("peer_timeout_ms = 5", "peer_timeout_ms: no such key, .*did you mean peer_timeout_s?"),
        ("[slots]\nslots_byte = 5", "slots.slots_byte: no such key, .*did you mean slots.slot_bytes?"),
        ("[slots]\nslot_bytes = '8 MiB'", r"slots.slot_bytes: got '8 MiB', expected `int` \(bytes\)"),
        ("[slots]\nslot_bytes = 100", r"slots.slot_bytes: got 100, expected `int` >= 4096 \(bytes\)"),
        ("[slots]\nnum_slots = 0", "slots.num_slots: got 0, expected `int` >= 1"),
        ("slots = 3", "slots: got 3, expected a table"),
        ("mode = 'pack'", "mode: got 'pack', expected one of auto, packed, raw, p2p, serial"),
        ("[transport]\nname = 'nixxl'", "transport.name: got 'nixxl', expected one of nixl, mooncake, loopback"),
        ("[transport.options]\na = [1]", "transport.options: got {'a': \\[1\\]}"),
        ("peer_timeout_s = 0", r"peer_timeout_s: got 0, expected `float` > 0.0 \(seconds\)"),
        ("peer_timeout_s = '5s'", r"peer_timeout_s: got '5s', expected `float` \(seconds\)"),
        ("num_threads = true", "num_threads: got True, expected `int`"),
        ("listen_port = 65536", "listen_port: got 65536, expected `int` <= 65535"),
        ("log_level = 'verbose'", "log_level: got 'verbose', expected one of debug, info, warning, error"),
        ("mode = 'autp'", "mode: got 'autp', expected one of .*; did you mean auto?"),
        ("dst_rank = 1", "dst_rank: got a key of decode agents, expected those of a prefill agent in this file"),
        (
            "[ops]\nlisten_port = 9400",
            "ops.listen_host: got nothing, expected the address at which port 9400 is served",
        ),
        ("a =", "is no TOML file"),
    ],
)
def test_wrong_values(tmp_path: Path, text: str, message: str) -> None:
    needed = "" if text == "" or text.startswith("socket_dir") else 'socket_dir = "/run/kvxfer"\n'
    path = _write(tmp_path, needed + text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_prefill_config(path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_key_of_the_other_role_is_called_one(tmp_path: Path) -> None:
    path = _write(tmp_path, 'socket_dir = "/run/kvxfer"\nadvertise_host = "10.0.0.7"')
    with pytest.raises(
        ConfigError, match="advertise_host: got a key of prefill agents, expected those of a decode agent"
    ):
        load_decode_config(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_prefill_config(tmp_path / "none.toml")


def test_not_utf8(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_bytes(b'socket_dir = "\xff"')
    with pytest.raises(ConfigError, match="is no TOML file"):
        load_prefill_config(path)


def test_longest_socket_path(tmp_path: Path) -> None:
    limit = MAX_SOCKET_PATH_BYTES - MAX_SOCKET_NAME_BYTES - 1
    fits = "/" + "x" * (limit - 1)
    assert load_decode_config(_write(tmp_path, f'socket_dir = "{fits}"')).socket_dir == fits
    with pytest.raises(ConfigError, match=f"socket_dir: got a path of {limit + 1} bytes, expected at most {limit}"):
        load_decode_config(_write(tmp_path, f'socket_dir = "{fits}x"'))
    umlauts = "/" + "ä" * (limit // 2)  # bytes count, not characters
    with pytest.raises(ConfigError, match="socket_dir: got a path of"):
        load_decode_config(_write(tmp_path, f'socket_dir = "{umlauts}"'))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "*"])
def test_wildcards_are_never_advertised(tmp_path: Path, host: str) -> None:
    base = f'socket_dir = "/run/kvxfer"\nlisten_host = "{host}"\n'
    with pytest.raises(ConfigError, match="advertise_host: got nothing"):
        load_prefill_config(_write(tmp_path, base))
    with pytest.raises(ConfigError, match="advertise_host: got "):
        load_prefill_config(_write(tmp_path, base + f'advertise_host = "{host}"'))
    assert load_prefill_config(_write(tmp_path, base + 'advertise_host = "10.0.0.7"')).advertise_host == "10.0.0.7"


def test_rank_outside_its_world(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dst_rank: got 4, expected below dst_world 4"):
        load_decode_config(_write(tmp_path, 'socket_dir = "/run/kvxfer"\ndst_rank = 4\ndst_world = 4'))
