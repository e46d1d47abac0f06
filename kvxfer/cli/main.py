"""The `kvxfer` command. Commands import what they need when they run: an agent must start fast and stay small."""

from __future__ import annotations

import enum
import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvxfer.cli.options import choice, whole
from kvxfer.cli.output import EXIT_FAILED, print_json, report_error, show_steps
from kvxfer.errors import ConfigError, KvxferError

if TYPE_CHECKING:
    from kvxfer.cli.bench_transfer import TransferResult

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Moves the KV cache of MLA models from prefill workers to decode workers split by decode context parallelism.",
)
bench = typer.Typer(no_args_is_help=True, help="Measure transfers and kernels.")
app.add_typer(bench, name="bench")


class _Transport(enum.Enum):
    NIXL = "nixl"
    MOONCAKE = "mooncake"
    LOOPBACK = "loopback"


class _Mode(enum.Enum):
    AUTO = "auto"
    PACKED = "packed"
    RAW = "raw"
    P2P = "p2p"
    SERIAL = "serial"


class _DemoMode(enum.Enum):
    AUTO = "auto"
    PACKED = "packed"
    RAW = "raw"
    P2P = "p2p"


class _Device(enum.Enum):
    CPU = "cpu"
    CUDA = "cuda"


class _Placement(enum.Enum):
    AGENT = "agent"
    WORKER = "worker"


class _Slots(enum.Enum):
    PINNED_HOST = "pinned_host"
    DEVICE = "device"


class _Busy(enum.Enum):
    NONE = "none"
    LONG = "long"
    SHORT = "short"


class _Verify(enum.Enum):
    OFF = "off"
    FULL = "full"


class _Pages(enum.Enum):
    SHUFFLED = "shuffled"
    ADJACENT = "adjacent"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvxfer {importlib.metadata.version('kvxfer')}")
        raise typer.Exit


_Config = Annotated[Path, typer.Option("--config", help="TOML file; docs/configuration.md has every key.")]
_ReadyJson = Annotated[bool, typer.Option("--json", help="Print one line of JSON when ready.")]
_Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
]
_EngineName = Annotated[_Transport, choice("--transport", _Transport, "Engine that moves the slots.")]
_Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.callback()
def _root(_version: _Version = False) -> None:
    """Without a text here the app's own help stands."""


@app.command()
def prefill(config: _Config, as_json: _ReadyJson = False) -> None:
    """Run the agent of a prefill worker until SIGTERM or Ctrl-C."""
    from kvxfer.cli.agents import run_prefill

    run_prefill(config, as_json)


@app.command()
def decode(config: _Config, as_json: _ReadyJson = False) -> None:
    """Run the agent of a decode worker until SIGTERM or Ctrl-C."""
    from kvxfer.cli.agents import run_decode

    run_decode(config, as_json)


@app.command()
def keygen(
    out: Annotated[Path, typer.Option(help="New file for the secret key, made with mode 0600.")] = Path("kvxfer.key"),
    as_json: _Json = False,
) -> None:
    """Make the keys of an agent: the secret one into a file, the public one on standard output."""
    from kvxfer.cli.keygen import make_keys

    make_keys(out, as_json)


@app.command()
def demo(
    prompt: Annotated[Path | None, typer.Option(help="Text to prefill, one token a byte. Default: the README.")] = None,
    ranks: Annotated[int, whole("--ranks", "Decode workers: the DCP size.", 1, 16)] = 4,
    mode: Annotated[
        _DemoMode,
        choice("--mode", _DemoMode, "packed: in slots; raw: each run as it lies; p2p: pulled; auto: the fastest."),
    ] = _DemoMode.PACKED,
    transport: _EngineName = _Transport.NIXL,
    draft_layers: Annotated[
        int, whole("--draft-layers", "Layers of a draft model, whose KV every rank gets.", 0, 8)
    ] = 0,
    state_bytes: Annotated[
        int,
        whole(
            "--state-bytes",
            "Bytes of a state blob as well: about half is split over the ranks, each gets the rest whole.",
            0,
            16 << 20,
        ),
    ] = 0,
    decode_steps: Annotated[
        int, whole("--decode-steps", "Then decode so many tokens over the ranks, and in one process.", 0, 1000)
    ] = 0,
    as_json: _Json = False,
) -> None:
    """Move the KV cache of a real prompt between processes and compare every byte. Exit status 1 if any differs."""
    from kvxfer.cli.demo import run_demo
    from kvxfer.cli.demo_stage import DemoOptions

    options = DemoOptions(prompt, ranks, mode.value, transport.value, draft_layers, state_bytes, decode_steps)
    with show_steps() as steps:
        result = run_demo(options, steps)
    if as_json:
        print_json(result.as_json())
    else:
        from kvxfer.cli.tables import print_demo

        print_demo(result)
    if not result.is_right:
        sys.exit(EXIT_FAILED)


@bench.command("transfer", short_help="Time the whole path between processes, beside one contiguous write.")
def bench_transfer(
    transport: _EngineName = _Transport.NIXL,
    mode: Annotated[
        _Mode | None,
        choice("--mode", _Mode, "As in the demo, packed by default. serial: pack a whole chunk before it is sent."),
    ] = None,
    compare: Annotated[str, typer.Option(help="In place of --mode: several in turn, such as packed,raw,serial.")] = "",
    tokens: Annotated[int, whole("--tokens", "Length of the sequence.", 0)] = 8192,
    layers: Annotated[int, whole("--layers", "Layers of the model.", 1)] = 61,
    row_bytes: Annotated[int, whole("--row-bytes", "KV bytes of one token in one layer, at most a slot.", 1)] = 1152,
    page: Annotated[int, whole("--page", "Tokens a page, on both sides.", 1)] = 64,
    pages: Annotated[_Pages, choice("--pages", _Pages, "How the pages of a sequence lie in a pool.")] = _Pages.SHUFFLED,
    dcp: Annotated[int, whole("--dcp", "Decode workers: the DCP size.", 1, 16)] = 4,
    interleave: Annotated[int, whole("--interleave", "Neighbouring tokens that one rank owns.", 1)] = 1,
    chunk: Annotated[int, whole("--chunk", "Tokens a submit, as chunked prefill hands them over.", 1)] = 8192,
    repeat: Annotated[int, whole("--repeat", "Measured transfers, after one that warms up.", 1)] = 3,
    num_slots: Annotated[int, whole("--num-slots", "Slots of an agent; serial takes what it needs.", 1, 4096)] = 4,
    slot_kib: Annotated[int, whole("--slot-kib", "Size of one slot, in KiB; serial takes what it needs.", 4)] = 16384,
    interval_ms: Annotated[
        float,
        typer.Option(
            help="A submit every so many milliseconds, up to 10,000, as chunked prefill computes; 0: at once."
        ),
    ] = 0.0,
    wire_gb_s: Annotated[
        float | None,
        typer.Option(help="Emulate a wire of this rate, up to 10,000 (--transport loopback); all ranks share it."),
    ] = None,
    descriptor_us: Annotated[
        float, typer.Option(help="Time that a descriptor takes on the emulated wire, up to 1e6.")
    ] = 0.0,
    device: Annotated[
        _Device, choice("--device", _Device, "Where the pools lie; workers that share a GPU are one process.")
    ] = _Device.CPU,
    gpus: Annotated[
        int,
        whole("--gpus", "The prefill worker has GPU 0, decode ranks in turn the others; 1: all have GPU 0.", 1, 16),
    ] = 1,
    placement: Annotated[
        _Placement | None,
        choice(
            "--placement",
            _Placement,
            "Who moves rows between pools and slots. Default: agent on the CPU, worker on a GPU.",
        ),
    ] = None,
    slots: Annotated[
        _Slots, choice("--slots", _Slots, "Where the agents' slots lie: in host memory, or on the GPU (--device cuda).")
    ] = _Slots.PINNED_HOST,
    busy: Annotated[
        _Busy,
        choice("--busy", _Busy, "The prefill worker multiplies matrices meanwhile: 4096^3 (long) or 1024^3 (short)."),
    ] = _Busy.NONE,
    verify: Annotated[
        _Verify,
        choice("--verify", _Verify, "full: a checksum with every packed segment, compared before its rows are used."),
    ] = _Verify.OFF,
    plot: Annotated[
        Path | None, typer.Option(help="Draw when each slot was busy into this SVG file, last repeat; one mode only.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Time the whole path between processes: open, plan, pack, send, scatter, landed; and one contiguous write of the
    same bytes, or an emulated wire. Efficiency is the goodput of the first over that of the second. Every byte is
    compared outside the timing. Exit status 1 if any differs."""
    from kvxfer.cli.bench_transfer import run_cases, run_with_plot
    from kvxfer.cli.timeline import check_plot
    from kvxfer.cli.transfer_case import TransferCase
    from kvxfer.slot_memory import available_bytes

    if plot is not None:
        check_plot(plot, compare)
    placement = placement or (_Placement.AGENT if device is _Device.CPU else _Placement.WORKER)
    cases = [
        TransferCase(
            transport.value,
            each.value,
            tokens,
            layers,
            row_bytes,
            page,
            pages.value,
            dcp,
            interleave,
            chunk,
            repeat,
            num_slots,
            slot_kib << 10,
            interval_ms * 1e-3,
            wire_gb_s,
            descriptor_us,
            device.value,
            placement.value,
            busy.value,
            verify.value,
            num_gpus=gpus,
            slot_kind=slots.value,
        )
        for each in _modes(mode, compare)
    ]
    for case in cases:  # all before the first is run, which may take long
        case.check()
        case.check_memory(available_bytes())
    with show_steps() as steps:
        results = run_cases(cases, steps) if plot is None else [run_with_plot(cases[0], steps, plot)]
    _print_results(results, as_json=as_json, is_comparison=bool(compare))
    if any(result.problems for result in results):
        sys.exit(EXIT_FAILED)


def _print_results(results: list[TransferResult], *, as_json: bool, is_comparison: bool) -> None:
    if as_json:
        _print_facts([result.as_json() for result in results], is_comparison=is_comparison)
    else:
        from kvxfer.cli.tables import print_transfers

        print_transfers(results)


def _print_facts(facts: list[dict[str, Any]], *, is_comparison: bool) -> None:
    if not is_comparison:
        print_json(facts[0])
        return
    first = facts[0]
    ratios = {f"{first['mode']}_to_{fact['mode']}": fact["transfer_ms"] / first["transfer_ms"] for fact in facts[1:]}
    print_json({"modes": facts, "ratios": ratios, "verified": all(fact["verified"] for fact in facts)})


@bench.command("kernels")
def bench_kernels(
    plot: Annotated[Path | None, typer.Option(help="Also draw the results into this file; needs matplotlib.")] = None,
    only: Annotated[str | None, typer.Option(help="Time only the kernel of this name, such as gather_rows.")] = None,
    as_json: _Json = False,
) -> None:
    """Time every kernel on this machine's GPU: us, GB/s, share of the measured copy rate, goals and peers' figures."""
    from kvxfer.cli import bench_kernels

    bench_kernels.bench_kernels(as_json, plot, only)


def _modes(mode: _Mode | None, compare: str) -> list[_Mode]:
    """The modes to be run one after another."""
    if not compare:
        return [mode or _Mode.PACKED]
    if mode is not None:
        raise ConfigError(f"--mode: got {mode.value} beside --compare {compare}, expected one of the two options")
    return [_parse_mode(name) for name in compare.split(",")]


def _parse_mode(name: str) -> _Mode:
    try:
        return _Mode(name.strip())
    except ValueError as error:
        raise ConfigError(
            f"--compare: got {name.strip()!r}, expected some of {', '.join(mode.value for mode in _Mode)}"
        ) from error


def main() -> None:
    """Entry point of the `kvxfer` command."""
    try:
        app()
    except KvxferError as error:
        sys.exit(report_error(error))


if __name__ == "__main__":
    main()
