"""The processes of a bench: they stay from one case to the next as far as the cases agree."""

from __future__ import annotations

from kvxfer.cli import protocol
from kvxfer.cli.ensemble import Ensemble, Setup, gpu_of_rank, start_workers
from kvxfer.cli.harness import Cast

_TIMEOUT_S = 180.0


class Stage:
    """Workers, agents and yardstick of several cases in turn. `Cast` ends them."""

    def __init__(self, cast: Cast, num_ranks: int, num_gpus: int | None) -> None:
        """Start workers for cases of up to `num_ranks` ranks, whose pools lie on `num_gpus` GPUs; None: on the host."""
        self._cast = cast
        self._workers = start_workers(cast, num_ranks, num_gpus=num_gpus)
        self._ensemble: Ensemble | None = None
        self._yardstick: Yardstick | None = None

    def ensemble(self, setup: Setup) -> Ensemble:
        """Agents for `setup`, whose workers have nothing handed over."""
        if self._ensemble is not None:
            self._ensemble.let_go()
            if self._ensemble.setup == setup:
                return self._ensemble
            self._cast.stop_agents()
        self._ensemble = Ensemble(self._cast, setup, self._workers)
        return self._ensemble

    def yardstick(self, transport: str, num_bytes: int) -> Yardstick:
        """The yardstick, ready for writes of `num_bytes`."""
        if self._yardstick is None:
            self._yardstick = Yardstick(self._cast)
        self._yardstick.prepare(transport, num_bytes)
        return self._yardstick


class CopyYardstick:
    """One copy of the case's bytes by torch, from the GPU of the prefill worker to that of the first decode rank."""

    path = ""

    def __init__(self, ensemble: Ensemble, num_bytes: int) -> None:
        self._worker = ensemble.prefill
        self._command = protocol.CopyAcross(
            num_bytes=num_bytes, dst_device_index=gpu_of_rank(0, ensemble.setup.num_gpus)
        )

    def write_once(self) -> float:
        """Seconds of one copy, whose bytes were compared."""
        return self._worker.ask(self._command, protocol.Copied, _TIMEOUT_S).elapsed_s

    def check(self) -> list[str]:
        """Nothing: a copy that went wrong has failed."""
        return []


class Yardstick:
    """Two processes with nothing but the engine: one write of the case's bytes, one descriptor."""

    _FILL = 0x5C

    def __init__(self, cast: Cast) -> None:
        self._writer = cast.start_worker("yardstick-writer", "kvxfer.cli.yardstick")
        self._target = cast.start_worker("yardstick-target", "kvxfer.cli.yardstick")
        self._target_region: protocol.EngineOpen | None = None
        self._prepared: tuple[str, int] | None = None
        self.path = ""

    def prepare(self, transport: str, num_bytes: int) -> None:
        """Open the engines and registered memory at both ends, unless they are open as they shall be."""
        if self._prepared == (transport, num_bytes):
            return
        ends = (self._writer, self._target)
        if self._prepared is not None:
            for end in ends:
                end.ask(protocol.LetGo(), protocol.Done, _TIMEOUT_S)
        for end, fill in zip(ends, (self._FILL, 0), strict=True):
            end.send(protocol.OpenEngine(transport=transport, num_bytes=num_bytes, fill=fill))
        _, self._target_region = [end.receive(protocol.EngineOpen, _TIMEOUT_S) for end in ends]
        self._prepared = (transport, num_bytes)

    def write_once(self) -> float:
        """Seconds of one write. Call `prepare` first."""
        assert self._target_region is not None
        written = self._writer.ask(protocol.WriteOnce(target=self._target_region), protocol.Written, _TIMEOUT_S)
        self.path = written.path
        return written.elapsed_s

    def check(self) -> list[str]:
        """What is wrong with the bytes that arrived; nothing if all are right."""
        problem = self._target.ask(protocol.CheckFill(fill=self._FILL), protocol.Verified, _TIMEOUT_S).problem
        return [problem] if problem else []
