"""The calls of CUDA's driver that row streams and shared pools need, each checked.

Importing this needs no CUDA. The first call does: it raises `EngineMissingError` where cuda-bindings or the GPU's
driver is not installed.
"""

from __future__ import annotations

import functools
from typing import Any, Final

from kvxfer.errors import EngineMissingError, RegistrationError, TransportError
from kvxfer.memory import HostMemory

_REMEDIES = {
    "CUDA_ERROR_NO_DEVICE": "no GPU is visible to this process; look at CUDA_VISIBLE_DEVICES and the container's GPUs",
    "CUDA_ERROR_INVALID_DEVICE": "the device index names no GPU that is visible to this process",
    "CUDA_ERROR_OUT_OF_MEMORY": "the GPU has no memory left for this; leave some free of the engine's share",
    "CUDA_ERROR_NOT_SUPPORTED": "this GPU or its driver cannot do that; use the path over host memory",
    "CUDA_ERROR_ILLEGAL_ADDRESS": "an earlier kernel of this process has broken its context; the process must end",
}
_ORDERED_FOR_OWNER: Final = 100  # CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
_REGISTRATION_REMEDY = (
    "allow this process to lock its memory (ulimit -l unlimited, CAP_IPC_LOCK in a container), or make the slots "
    "smaller; without registered slots only the path over host memory is left"
)


@functools.cache
def cuda() -> Any:  # noqa: ANN401 - cuda-bindings has no types
    """`cuda.bindings.driver`, initialised."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise EngineMissingError("GPU streams need the package cuda-bindings: install kvxfer[gpu]") from error
    try:
        result = driver.cuInit(0)
    except RuntimeError as error:  # the bindings found no libcuda
        raise EngineMissingError(
            f"GPU streams need NVIDIA's driver library libcuda.so.1, which comes with the GPU's driver: {error}"
        ) from error
    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise TransportError(_message(driver, "cuInit", result[0]))
    return driver


def check(call: str, result: tuple[Any, ...]) -> Any:  # noqa: ANN401
    """What a driver call returned, without its error code; None where there is nothing else.

    Raises `TransportError` with the remedy where the code is not CUDA_SUCCESS.
    """
    error = result[0]
    if error != 0:
        raise TransportError(_message(cuda(), call, error))
    return result[1] if len(result) == 2 else result[1:] or None


def _message(driver: Any, call: str, error: Any) -> str:  # noqa: ANN401
    name = driver.CUresult(error).name
    remedy = _REMEDIES.get(name)
    return f"{call}: got {name}, expected CUDA_SUCCESS" + (f": {remedy}" if remedy else "")


class Gpu:
    """A GPU's primary context, the one that torch uses. `with` makes it current in the calling thread for a while.

    One object a device and process, from `gpu()`; contexts live as long as the process does.
    """

    def __init__(self, device_index: int) -> None:
        """Use `gpu`."""
        driver = cuda()
        self.device_index = device_index
        self.device = check("cuDeviceGet", driver.cuDeviceGet(device_index))
        self._context = check("cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(self.device))
        self._push = driver.cuCtxPushCurrent
        self._pop = driver.cuCtxPopCurrent

    def __enter__(self) -> Gpu:
        check("cuCtxPushCurrent", self._push(self._context))
        return self

    def __exit__(self, *_error: object) -> None:
        check("cuCtxPopCurrent", self._pop())

    @property
    def uuid(self) -> str:
        """Names the GPU in every process and container, as 32 hexadecimal digits."""
        return bytes(check("cuDeviceGetUuid", cuda().cuDeviceGetUuid(self.device)).bytes).hex()

    @property
    def capability(self) -> int:
        """Compute capability, 90 for 9.0."""
        return self.attribute("COMPUTE_CAPABILITY_MAJOR") * 10 + self.attribute("COMPUTE_CAPABILITY_MINOR")

    def attribute(self, name: str) -> int:
        """CU_DEVICE_ATTRIBUTE_`name`."""
        driver = cuda()
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check("cuDeviceGetAttribute", driver.cuDeviceGetAttribute(attribute, self.device)))

    @functools.cached_property
    def _must_flush(self) -> bool:
        """Whether network adapters can write to the GPU, and its own kernels may not see that in order."""
        ordering = self.attribute("GPU_DIRECT_RDMA_WRITES_ORDERING")
        return bool(self.attribute("GPU_DIRECT_RDMA_SUPPORTED")) and ordering < _ORDERED_FOR_OWNER

    def flush_writes(self) -> None:
        """Let kernels see what network adapters have written to this GPU, where that is not so by itself. Raises
        `TransportError`."""
        if not self._must_flush:
            return
        driver = cuda()
        target = driver.CUflushGPUDirectRDMAWritesTarget.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX
        scope = driver.CUflushGPUDirectRDMAWritesScope.CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER
        with self:
            check("cuFlushGPUDirectRDMAWrites", driver.cuFlushGPUDirectRDMAWrites(target, scope))

    def can_access(self, device_index: int) -> bool:
        """Whether kernels of this GPU reach memory of the one that this process knows under `device_index`."""
        driver = cuda()
        owner = check("cuDeviceGet", driver.cuDeviceGet(device_index))
        return bool(check("cuDeviceCanAccessPeer", driver.cuDeviceCanAccessPeer(self.device, owner)))

    def register(self, memory: HostMemory) -> int:
        """Let the GPU read and write `memory`; the address by which it does. Until `unregister`.

        Raises `RegistrationError` where the memory cannot be locked.
        """
        driver = cuda()
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP | driver.CU_MEMHOSTREGISTER_PORTABLE
        with self:
            error = driver.cuMemHostRegister(memory.address, memory.num_bytes, flags)[0]
            if error != 0:
                raise RegistrationError(
                    f"cuMemHostRegister of {memory.num_bytes} bytes: got {driver.CUresult(error).name}, expected "
                    f"CUDA_SUCCESS: {_REGISTRATION_REMEDY}"
                )
            try:
                return int(check("cuMemHostGetDevicePointer", driver.cuMemHostGetDevicePointer(memory.address, 0)))
            except TransportError:
                driver.cuMemHostUnregister(memory.address)
                raise

    def unregister(self, memory: HostMemory) -> None:
        """End `register`. No stream may touch the memory any more."""
        with self:
            check("cuMemHostUnregister", cuda().cuMemHostUnregister(memory.address))

    def create_stream(self, priority: int) -> Any:  # noqa: ANN401
        """A stream that waits for no other. `priority`: 0 is that of most streams, lower ones go first; CUDA takes the
        nearest that the GPU has. Raises `TransportError`."""
        driver = cuda()
        with self:
            flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            return check("cuStreamCreateWithPriority", driver.cuStreamCreateWithPriority(flags, priority))


class PinnedMemories:
    """Host memory that one owner's streams read and write, each from `add` until `remove` or `close`."""

    def __init__(self, device: Gpu) -> None:
        self._gpu = device
        self._memories: list[HostMemory] = []

    def __contains__(self, memory: object) -> bool:
        return memory in self._memories

    def add(self, memory: HostMemory) -> int:
        """`Gpu.register`."""
        address = self._gpu.register(memory)
        self._memories.append(memory)
        return address

    def remove(self, memory: HostMemory) -> None:
        """`Gpu.unregister`."""
        self._gpu.unregister(memory)
        self._memories.remove(memory)

    def close(self) -> None:
        """Give all back. A context that is broken refuses, and has nothing left to give back."""
        with self._gpu:
            for memory in self._memories:
                cuda().cuMemHostUnregister(memory.address)
        self._memories.clear()


@functools.cache
def gpu(device_index: int) -> Gpu:
    """The GPU that this process knows under `device_index`. Raises `EngineMissingError`, `TransportError`."""
    return Gpu(device_index)


def find_gpu(uuid: str) -> int | None:
    """The index of the visible GPU with that UUID, or None. Makes no context there, which takes memory."""
    driver = cuda()
    for device_index in range(check("cuDeviceGetCount", driver.cuDeviceGetCount())):
        device = check("cuDeviceGet", driver.cuDeviceGet(device_index))
        if bytes(check("cuDeviceGetUuid", driver.cuDeviceGetUuid(device)).bytes).hex() == uuid:
            return device_index
    return None
