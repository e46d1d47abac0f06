"""`kvxfer bench kernels`: every kernel on one GPU, in microseconds, GB/s and as a share of the measured copy rate.

Times are medians over replays of a CUDA graph that holds many calls, so that the host's launches stay out of them.
"""
# torch leaves its CUDA streams and events untyped.
# mypy: disable-error-code="no-untyped-call"

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from kvxfer.cli.kernel_cases import Case, builders
from kvxfer.cli.output import check_plot_file
from kvxfer.errors import ConfigError, KvxferError

_COPY_BYTES = 2 << 30
_GRAPH_US = 2000.0
_MAX_CALLS = 400
_NUM_REPLAYS = 30


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the report; `met` says whether the case's goal was reached, None where it has none."""

    kernel: str
    shape: str
    us: float
    gbs: float
    share_of_copy: float
    tflops: float | None
    goal: str
    met: bool | None
    peers_us: dict[str, float]
    extra_bytes: int


def graph_us(run: Callable[[], object], agree: Callable[[float], float] = float) -> float:
    """The median time of one call in a replayed graph, microseconds.

    Where `run` holds a collective, `agree` makes one of the ranks' estimates of it: all must capture as many calls.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()  # compiles
        # Short calls need many in a graph to hide its own launch; a few tell how many.
        estimate_us = agree(_replay_us(run, stream, num_calls=10, num_replays=5))
        num_calls = max(1, min(_MAX_CALLS, int(_GRAPH_US / estimate_us)))
        return _replay_us(run, stream, num_calls, _NUM_REPLAYS)


def _replay_us(run: Callable[[], object], stream: torch.cuda.Stream, num_calls: int, num_replays: int) -> float:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(num_calls):
            run()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(num_replays):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / num_calls)
    # The first half brings clocks and caches to where they stay.
    return float(statistics.median(times[num_replays // 2 :]))


def copy_rate() -> float:
    """Bytes read and written by large device-to-device copies, GB/s: the ceiling of this GPU."""
    src = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    src.view(torch.int64).random_()
    dst = torch.empty_like(src)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in range(_NUM_REPLAYS):
        # Not in a graph: its copy nodes were seen to run at two thirds of the rate.
        begin.record()
        dst.copy_(src)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return 2 * _COPY_BYTES / float(statistics.median(times[_NUM_REPLAYS // 2 :])) / 1e3


def measure(case: Case, copy_gbs: float) -> Result:
    torch.cuda.synchronize()
    before_bytes = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    case.run()
    torch.cuda.synchronize()
    extra_bytes = torch.cuda.max_memory_allocated() - before_bytes
    us = graph_us(case.run)
    gbs = case.num_bytes / us / 1e3
    tflops = case.flops / us / 1e6 if case.flops else None
    share = gbs / copy_gbs
    goal, met = "", None
    if case.goal_us is not None:
        goal, met = f"<= {case.goal_us:g} us", us <= case.goal_us
    elif case.goal_share is not None:
        goal, met = f">= {case.goal_share:.2f} of copy", share >= case.goal_share
    elif case.goal_tflops is not None and tflops is not None:
        goal, met = f">= {case.goal_tflops:g} TFLOP/s", tflops >= case.goal_tflops
    return Result(case.kernel, case.shape, us, gbs, share, tflops, goal, met, case.peers_us, extra_bytes)


def run_cases(only: str | None) -> Iterator[tuple[float, Result]]:
    """The copy rate and one result after another; each case's memory goes back before the next is built."""
    rate = copy_rate()
    for kernel, make in builders():
        if only in (None, kernel):
            yield rate, measure(make(), rate)


def show(copy_gbs: float, results: list[Result]) -> None:
    table = Table(title=f"{torch.cuda.get_device_name()}, device-to-device copy {copy_gbs:.0f} GB/s")
    for heading in ("kernel", "shape", "us", "GB/s", "of copy", "TFLOP/s", "goal", "met", "peers, us"):
        table.add_column(heading, justify="left" if heading in ("kernel", "shape") else "right")
    for r in results:
        peers = ", ".join(f"{name} {us:g}" for name, us in r.peers_us.items())
        tflops = "" if r.tflops is None else f"{r.tflops:.0f}"
        met = "" if r.met is None else ("yes" if r.met else "NO")
        table.add_row(
            r.kernel, r.shape, f"{r.us:.2f}", f"{r.gbs:.0f}", f"{r.share_of_copy:.3f}", tflops, r.goal, met, peers
        )
    Console(width=150).print(table)


def draw(path: Path, copy_gbs: float, results: list[Result]) -> None:
    """A bar for each case: its share of the copy rate."""
    import matplotlib as mpl  # here, because only --plot needs it: an optional dependency

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 0.32 * len(results) + 1.2))
    labels = [f"{r.kernel}: {r.shape}" for r in results]
    axes.barh(labels, [r.share_of_copy for r in results], color="#2f6f8f")
    axes.axvline(1.0, color="#999999", linewidth=1)
    axes.invert_yaxis()
    axes.set_xlabel(f"share of the device-to-device copy rate, {copy_gbs:.0f} GB/s")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)


def bench_kernels(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Also draw the results into this file (needs matplotlib).")] = None,
    only: Annotated[str | None, typer.Option(help="Time only the kernel of this name.")] = None,
) -> None:
    """Time every kernel on this machine's GPU: us, GB/s, share of the measured copy rate, goals and peers' figures.

    Raises `ConfigError` for a name that no kernel has, `KvxferError` where there is no GPU or no matplotlib.
    """
    kernels = list(dict.fromkeys(kernel for kernel, _ in builders()))
    if only is not None and only not in kernels:
        raise ConfigError(f"--only: got {only!r}, expected one of {', '.join(kernels)}")
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise KvxferError("--plot needs matplotlib, which is not installed: pip install 'kvxfer[docs]'")
    if plot is not None:
        check_plot_file(plot)
    if not torch.cuda.is_available():
        raise KvxferError("no CUDA device: the kernels' speed can only be measured on a GPU")
    timed = list(run_cases(only))
    copy_gbs, results = timed[0][0], [result for _, result in timed]
    if as_json:
        report: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "copy_gbs": copy_gbs,
            "kernels": [asdict(result) for result in results],
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        show(copy_gbs, results)
    if plot is not None:
        draw(plot, copy_gbs, results)


if __name__ == "__main__":
    try:
        typer.run(bench_kernels)
    except KvxferError as error:
        sys.exit(f"kvxfer: {error}")
