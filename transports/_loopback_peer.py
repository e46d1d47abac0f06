"""A loopback peer: its published memory, mapped here."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import select

import numpy as np

from kvxfer.errors import HandoffError, PeerLostError, ProtocolError, TransportError
from kvxfer.streams.device import MappedPool, map_pool
from kvxfer.transports._metadata import Metadata, PublishedRegion
from kvxfer.transports._regions import RemoteRegion

_SYS_PIDFD_GETFD = 438  # on every architecture
_libc = ctypes.CDLL(None, use_errno=True)


def endpoint_here() -> str:
    """Names this process and the PID namespace in which others find it."""
    return f"pid-{os.getpid()} in {_pid_namespace()}"


def _pid_namespace() -> str:
    return os.readlink("/proc/self/ns/pid")


class LoopbackPeer:
    """A peer's published regions, mapped here, and a descriptor that tells of its process's end.

    `fds` are descriptors of the regions, for processes that map them too; `process_fd` is readable once the peer's
    process has ended, and `is_gone` says so where somebody watches it. `close()` frees the descriptors.
    """

    def __init__(self, peer: str, metadata: Metadata, gpu_index: int = -1) -> None:
        """`gpu_index`: of the GPU on which the own slots lie, -1 for host memory. Raises `PeerLostError`, and
        `ProtocolError` for regions in another kind of memory."""
        self.name = peer
        self._gpu_index = gpu_index
        self.pid = metadata.pid
        self.regions: dict[int, RemoteRegion] = {}
        self.fds: dict[int, int] = {}
        self._mappings: list[mmap.mmap | MappedPool] = []
        self.process_fd = -1
        self.is_gone = False
        if not metadata.endpoint.endswith(f" in {_pid_namespace()}"):
            raise PeerLostError(
                f"peer {peer}: got {metadata.endpoint}, expected one in {_pid_namespace()}, the PID namespace of this "
                "process: loopback finds its peers by process id"
            )
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            try:
                self.process_fd = os.pidfd_open(metadata.pid)
            except OSError as error:
                raise PeerLostError(f"peer {peer}: process {metadata.pid} is not there: {error}") from error
            for region in metadata.regions:
                if (region.gpu_index >= 0) != (gpu_index >= 0):
                    here, there = ("a GPU", "the host") if gpu_index >= 0 else ("the host", "a GPU")
                    raise ProtocolError(
                        f"slots.kind: got slots in memory of {here}, and those of peer {peer} in that of {there}, "
                        "expected the same kind on both sides: loopback copies within one"
                    )
                self.regions[region.region_id] = self._map(region) if gpu_index < 0 else self._map_gpu(region)
            on_error.pop_all()

    def _map(self, region: PublishedRegion) -> RemoteRegion:
        where = f"peer {self.name}, region {region.region_id} (/proc/{self.pid}/fd/{region.fd})"
        try:
            fd = os.open(f"/proc/{self.pid}/fd/{region.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise PeerLostError(f"{where} cannot be opened: {error}") from error
        self.fds[region.region_id] = fd
        found = os.fstat(fd)
        if (found.st_ino, found.st_dev, found.st_size) != (region.inode, region.device, region.num_bytes):
            raise PeerLostError(
                f"{where}: got inode {found.st_ino} with {found.st_size} bytes, expected inode {region.inode} "
                f"with {region.num_bytes}: the process has been replaced, or lives in another PID namespace"
            )
        mapping = mmap.mmap(fd, region.num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        self._mappings.append(mapping)
        mapping.madvise(mmap.MADV_DONTFORK)
        return RemoteRegion(region.num_bytes, int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data))

    def _map_gpu(self, region: PublishedRegion) -> RemoteRegion:
        where = f"peer {self.name}, region {region.region_id}"
        if region.handle is None:
            raise ProtocolError(f"{where}: got no handle of the GPU's memory")
        fd = None if region.handle.ipc else self._take_fd(region.fd, where)
        try:
            mapped = map_pool(region.handle, fd, device_index=self._gpu_index)
        except HandoffError as error:
            raise PeerLostError(f"{where}: {error}") from error
        finally:
            if fd is not None:
                os.close(fd)
        self._mappings.append(mapped)
        if mapped.pool.num_bytes != region.num_bytes:
            raise PeerLostError(f"{where}: got {mapped.pool.num_bytes} bytes of a GPU, expected {region.num_bytes}")
        return RemoteRegion(region.num_bytes, mapped.pool.address, self._gpu_index)

    def _take_fd(self, fd: int, where: str) -> int:
        """The peer's descriptor itself: to open that of memory of a GPU through /proc would open the GPU's device."""
        taken: int = _libc.syscall(_SYS_PIDFD_GETFD, self.process_fd, fd, 0)
        if taken < 0:
            raise PeerLostError(
                f"{where}: descriptor {fd} of process {self.pid} cannot be had: {os.strerror(ctypes.get_errno())}; "
                "loopback needs leave to trace it: one user, and kernel.yama.ptrace_scope 0 or CAP_SYS_PTRACE"
            )
        return taken

    @property
    def end_detail(self) -> str:
        """What a write is told that cannot arrive any more."""
        return f"process {self.pid} of the peer has ended"

    def is_dead(self) -> bool:
        """Whether its process has ended by now."""
        poller = select.poll()
        poller.register(self.process_fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        self.regions = {}
        for mapping in self._mappings:
            with contextlib.suppress(TransportError):  # a GPU that is lost has nothing to give back
                mapping.close()
        self._mappings.clear()
        for fd in self.fds.values():
            os.close(fd)
        self.fds.clear()
        if self.process_fd >= 0:
            os.close(self.process_fd)
            self.process_fd = -1
