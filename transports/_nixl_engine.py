"""One NIXL engine object, its start-up, and its errors.

The adapter works on the wheel's bindings. The wheel's Python class would fix the progress thread's interval at 0,
which costs a whole core for as long as the process lives; and `import nixl` imports torch where torch has no CUDA.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import os
import pathlib
import re
from collections import OrderedDict
from types import ModuleType
from typing import Any

import msgspec

from kvxfer.errors import EngineMissingError, TransportError
from kvxfer.streams.driver import Gpu
from kvxfer.transports._engine_thread import EngineError
from kvxfer.transports._engine_transport import UnreachablePeerError, host_id
from kvxfer.transports._metadata import Metadata
from kvxfer.transports._nixl_requests import NixlErrors, NixlRequests
from kvxfer.transports._regions import CheckedWrite
from kvxfer.transports._ucx_log import UcxLog
from kvxfer.transports.base import Outcome, Region

_PROGRESS_INTERVAL_US = 1000
MAX_POST_ENTRIES = 8192
MAX_PEER_ENTRIES = 4 * MAX_POST_ENTRIES
MAX_RESTING_PEERS = 64
MAX_UNREACHABLE_PEERS = 16
_RDMA_DEVICES = pathlib.Path("/sys/class/infiniband")
_logger = logging.getLogger(__name__)


class NixlOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`interface`: network device that UCX is confined to (`UCX_NET_DEVICES`); empty leaves the choice to UCX."""

    interface: str = ""


@functools.cache
def ucx_log() -> UcxLog:
    """The log of the one UCX in this process."""
    return UcxLog()


def has_rdma_device() -> bool:
    """Whether the kernel knows an RDMA device (`/sys/class/infiniband`)."""
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir())


def load_bindings(options: NixlOptions) -> ModuleType:
    """Import NIXL's bindings after setting what UCX reads at load time. Variables that are set already are kept."""
    if not has_rdma_device():
        # Without a device libuct_ib serves nothing, and its destructors crash the process after Python has ended.
        os.environ.setdefault("UCX_MODULES", "^ib")
    if options.interface:
        os.environ.setdefault("UCX_NET_DEVICES", options.interface)
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")  # every error comes as an exception too
    cuda_major = _torch_cuda_major()
    wheels = [f"nixl_cu{cuda_major}"] if cuda_major else ["nixl_cu13", "nixl_cu12"]
    for wheel in wheels:
        if importlib.util.find_spec(wheel) is None:
            continue
        try:
            with ucx_log().environment():
                return importlib.import_module(f"{wheel}._bindings")
        except ImportError as error:
            raise EngineMissingError(f"NIXL ({wheel}) is installed but does not load: {error}") from error
    raise EngineMissingError(
        f"transport 'nixl': got none of the packages {', '.join(wheels)}; install it with: pip install 'kvxfer[nixl]'"
    )


def _torch_cuda_major() -> str | None:
    """CUDA major version of the installed torch, read from its version file: importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version_file = pathlib.Path(spec.origin).parent / "version.py"
    match = re.search(r"^cuda\b[^=]*=\s*['\"](\d+)", version_file.read_text(), re.MULTILINE)
    return match[1] if match else None


class NixlEngine:
    """One nixlAgent: what is destroyed and made anew by a rotation."""

    max_post_entries = MAX_POST_ENTRIES
    max_peer_entries = MAX_PEER_ENTRIES

    def __init__(self, bindings: ModuleType, endpoint: str, is_target: bool, device: Gpu | None = None) -> None:
        """`device`: the GPU whose memory is registered besides host memory, None for host memory alone."""
        self._nixl = bindings
        self.endpoint = endpoint
        # UCX finds out about memory of a GPU, and copies it, in whatever context is current where it is called.
        self._context: contextlib.AbstractContextManager[object] = device or contextlib.nullcontext()
        self._has_gpu = device is not None
        config = bindings.nixlAgentConfig()
        # A target makes progress only through it. On the writing side it would spin on UCX's lock while a post copies.
        config.useProgThread = is_target
        config.pthrDelay = _PROGRESS_INTERVAL_US
        config.syncMode = bindings.NIXL_THREAD_SYNC_STRICT
        self._agent: Any = bindings.nixlAgent(endpoint, config)
        try:
            with ucx_log().environment(), self._context:
                self._backend = self._agent.createBackend("UCX", {})
        except bindings.nixlBackendError as error:
            raise TransportError(
                f"UCX does not start ({error}): look whether transport.interface is up and whether the variables UCX_* "
                "of this process leave it a way to peers"
            ) from error
        self._peers: dict[str, Metadata] = {}
        self._resting: OrderedDict[str, None] = OrderedDict()  # endpoints of dropped peers that are still loaded
        self.errors = NixlErrors(bindings)
        self._requests = NixlRequests(bindings, self._agent, self._backend, self.errors)
        self._num_unreachable = 0  # peers that were gone when they were to be loaded

    def register(self, region: Region) -> None:
        with self._context, self.errors.mapping(Outcome.FAILED, f"registering {region.num_bytes} bytes"):
            self._agent.registerMem(self._registration(region), [self._backend])

    def deregister(self, region: Region) -> None:
        with self._context, self.errors.mapping(Outcome.FAILED, f"deregistering {region.num_bytes} bytes"):
            self._requests.drop_idle()
            self._agent.deregisterMem(self._registration(region), [self._backend])

    def _registration(self, region: Region) -> object:
        place = self._requests.place(region.gpu_index)
        return self._nixl.nixlRegDList(place[0], [(region.address, region.num_bytes, place[1], "")])

    def metadata(self) -> bytes:
        with self._context:
            return bytes(self._agent.getLocalMD())

    def add_peer(self, peer: str, metadata: Metadata) -> None:
        self._check_memory(peer, metadata)
        try:
            with self._context, self.errors.mapping(Outcome.FAILED, f"loading the metadata of peer {peer}"):
                self._requests.drop_idle()
                loaded = self._agent.loadRemoteMD(metadata.engine)
        except UnreachablePeerError:
            self._num_unreachable += 1
            raise
        name = loaded.decode(errors="replace") if isinstance(loaded, bytes) else loaded
        if name != metadata.endpoint:
            raise EngineError(Outcome.FAILED, f"metadata of peer {peer}: got one of {name}, not {metadata.endpoint}")
        self._resting.pop(metadata.endpoint, None)
        self._peers[peer] = metadata

    def _check_memory(self, peer: str, metadata: Metadata) -> None:
        """Between memory of a GPU and host memory of one host UCX has no way but through TCP, at 0.4 GB/s."""
        if metadata.host != host_id():
            return
        for region in metadata.regions:
            if (region.gpu_index >= 0) != self._has_gpu:
                here, there = ("a GPU's", "the host's") if self._has_gpu else ("the host's", "a GPU's")
                raise EngineError(
                    Outcome.FAILED,
                    f"slots.kind: got slots in {here} memory and those of peer {peer} in {there}, on one host, where "
                    "UCX moves 0.4 GB/s from one to the other; expected the same kind on both sides",
                )

    def is_stale_for(self, metadata: Metadata) -> bool:  # noqa: ARG002 - a restarted peer has another endpoint
        # UCX keeps a descriptor for each connection that was refused, until the object is destroyed.
        return self._num_unreachable >= MAX_UNREACHABLE_PEERS

    def path(self, peer: str) -> str:
        metadata = self._peers.get(peer)
        if metadata is None:
            return "unknown"
        if metadata.host != host_id():
            return ucx_log().write_path("inter-node", is_gpu=self._has_gpu)
        return ucx_log().write_path("self" if metadata.pid == os.getpid() else "intra-node", is_gpu=self._has_gpu)

    def drop_peer(self, peer: str) -> None:
        metadata = self._peers.pop(peer, None)
        if metadata is None:
            return
        with self._context:
            self._requests.drop_idle()
        if metadata.endpoint in self._requests.faulty:
            self._requests.faulty.remove(metadata.endpoint)
            self._forget(metadata.endpoint)
            return
        # Forgetting a peer that lives leaves a connection open on both sides for ever, so one that did no harm rests
        # until it comes back, or until others have taken its place.
        self._resting[metadata.endpoint] = None
        if len(self._resting) > MAX_RESTING_PEERS:
            oldest, _ = self._resting.popitem(last=False)
            self._forget(oldest)

    def _forget(self, endpoint: str) -> None:
        with self._context, self.errors.mapping(Outcome.FAILED, f"dropping peer {endpoint}"):
            self._agent.invalidateRemoteMD(endpoint)

    def is_ready(self, peer: str) -> bool:
        return peer in self._peers

    def post(self, peer: str, entries: CheckedWrite) -> int | None:
        with self._context:
            return self._requests.post(self._peers[peer].endpoint, entries)

    def check(self, token: int) -> bool:
        with self._context:
            return self._requests.check(token)

    def abandon(self, token: int) -> None:
        with self._context:
            self._requests.abandon(token)

    def destroy(self) -> None:
        """End everything the object does. This, and nothing less, stops writes that were posted."""
        with self._context:
            self._requests.close()
            self._agent = None
        ucx_log().read_new()
