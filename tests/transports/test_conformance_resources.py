"""What every transport holds: nothing more after many cycles, nothing once it is closed; and how its process ends."""

from __future__ import annotations

import pytest

from tests.transports.conftest import ENGINES
from tests.transports.peers import Engine, PeerProcess, fill_random

# Counts move a little while an engine's own threads come and go; a leak in these many cycles would not be little.
_NUM_CYCLES = 100
_SLACK_FDS = 4
_SLACK_BYTES = 8 << 20


def _grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {key: after[key] - before[key] for key in before}


@pytest.mark.parametrize("engine", ENGINES)
def test_registrations_peers_rotations_and_whole_transports_leak_nothing(engine: Engine) -> None:
    with PeerProcess(engine) as writer, PeerProcess(engine) as target:
        # What a library makes once, at its first use, is no leak.
        writer.knows(target).call("write", peer=target.incarnation, entries=[[0, 0, 1]])
        assert set(writer.outcomes(1).values()) == {"done"}
        writer.call("register_cycles", count=10)
        writer.call("rotate")
        writer.call("reopen")
        before = writer.call("resources")
        writer.call("register_cycles", count=_NUM_CYCLES)
        grown = _grown(before, writer.call("resources"))
        assert grown["fds"] <= _SLACK_FDS
        assert grown["resident_bytes"] <= _SLACK_BYTES

        metadata = target.call("metadata")
        for _ in range(_NUM_CYCLES):
            writer.call("add_peer", peer="again", metadata=metadata)
            writer.call("drop_peer", peer="again")
        for _ in range(4):
            writer.call("rotate")
        grown = _grown(before, writer.call("resources"))
        assert grown["fds"] <= _SLACK_FDS
        assert grown["threads"] <= 1
        assert grown["resident_bytes"] <= 2 * _SLACK_BYTES

        fill_random(writer, seed=3)
        for _ in range(3):
            writer.call("reopen")
            writer.knows(target).call("write", peer=target.incarnation, entries=[[0, 0, 1 << 20]])
            assert set(writer.outcomes(1).values()) == {"done"}
            assert (target.bytes[: 1 << 20] == writer.bytes[: 1 << 20]).all()
        writer.call("reopen")
        grown = _grown(before, writer.call("resources"))
        assert grown["fds"] <= _SLACK_FDS
        assert grown["threads"] <= 1
        assert (writer.finish(), target.finish()) == (0, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_write_is_exact_again_whatever_was_made_anew_meanwhile(engine: Engine) -> None:
    with PeerProcess(engine) as writer, PeerProcess(engine) as target:
        num_bytes = 1 << 20

        def write(region_id: int) -> None:
            writer.bytes[:num_bytes] += 1
            region = [region_id, target.bytes.size]
            entry = [[0, 4096, num_bytes]]
            writer.call("write", peer=target.incarnation, entries=entry, region=region, contiguous=True)
            assert set(writer.outcomes(1).values()) == {"done"}
            assert (target.bytes[4096 : 4096 + num_bytes] == writer.bytes[:num_bytes]).all()

        fill_random(writer, seed=4)
        writer.knows(target)
        for _ in range(3):
            write(1)
        writer.call("register_cycles", count=1)
        write(1)
        target.call("register_cycles", count=1)
        writer.knows(target)
        region_id = 2
        for _ in range(2):
            write(region_id)
        writer.call("drop_peer", peer=target.incarnation)
        writer.knows(target)
        write(region_id)
        writer.call("rotate")
        write(region_id)
        assert (writer.finish(), target.finish()) == (0, 0)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_closed_transport_holds_no_more_than_the_library_itself(engine: Engine) -> None:
    # Mooncake keeps a pool of threads for the life of the process, UCX its log: they do not grow (see above).
    kept = {"loopback": (0, 0), "nixl": (3, 0), "mooncake": (12, 8)}[engine.transport]
    with PeerProcess(engine) as only:
        only.call("metadata")
        held = only.call("close_and_count")
        assert held["fds"] <= kept[0]
        assert held["threads"] <= kept[1]
        assert only.finish() == 0


@pytest.mark.nixl
def test_exit_process_ends_with_its_code_though_ucx_has_loaded_its_rdma_module() -> None:
    # This is what a machine with an RDMA device has; beside some system libraries an ordinary exit crashes there.
    environment = {"UCX_MODULES": "all", "KVXFER_TEST_EXIT": "exit_process"}
    with PeerProcess(Engine("nixl"), environment=environment) as writer, PeerProcess(Engine("nixl")) as target:
        writer.knows(target).call("write", peer=target.incarnation, entries=[[0, 0, 4096]])
        assert set(writer.outcomes(1).values()) == {"done"}
        assert (writer.finish(), target.finish()) == (0, 0)
