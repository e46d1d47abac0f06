"""`kvxfer bench transfer --plot`: an SVG that shows every segment of the last transfer, at true times."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from kvxfer.cli.bench_transfer import run_with_plot
from kvxfer.cli.output import Steps
from kvxfer.cli.timeline import Span, check_plot, draw_timeline
from kvxfer.cli.transfer_case import TransferCase
from kvxfer.errors import ConfigError

_CASE = TransferCase(
    transport="loopback",
    mode="packed",
    num_tokens=2000,
    num_layers=4,
    row_bytes=1152,
    page_tokens=16,
    pages="shuffled",
    num_ranks=2,
    interleave=1,
    chunk_tokens=2000,
    num_repeats=1,
    num_slots=4,
    slot_bytes=256 << 10,
    wire_gb_s=0.05,
)
_TITLE = re.compile(r"(.*): (.*), segment (\d+), ([\d.]+) to ([\d.]+) ms")
_Bar = tuple[str, int, float, float]  # lane, segment, begin and end in ms


def _bars(path: Path) -> dict[str, list[_Bar]]:
    bars: dict[str, list[_Bar]] = {"gather": [], "wait": [], "write": [], "scatter": []}
    for rect in ElementTree.parse(path).getroot().iter("{http://www.w3.org/2000/svg}rect"):
        if rect.get("class") in bars:
            found = _TITLE.fullmatch(rect[0].text or "")
            assert found is not None
            bars[rect.attrib["class"]].append((found[1], int(found[3]), float(found[4]), float(found[5])))
    return bars


def test_every_segment_is_gathered_written_and_scattered_once_and_gathers_overlap_writes(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    result = run_with_plot(_CASE, Steps(), path)
    assert result.problems == ()
    move = result.moves[-1]
    bars = _bars(path)
    for rank, landed in enumerate(move.landed):
        scattered = [segment for lane, segment, _, _ in bars["scatter"] if lane.startswith(f"rank {rank}, slot ")]
        assert sorted(scattered) == list(range(landed.num_segments))
    segments = Counter(segment for _, segment, _, _ in bars["scatter"])
    assert Counter(segment for _, segment, _, _ in bars["gather"]) == segments
    assert Counter(segment for _, segment, _, _ in bars["write"]) == segments
    assert sum(segments.values()) == move.sent.num_segments > 2 * _CASE.num_slots
    every = [bar for kind in bars.values() for bar in kind]
    assert all(0.0 <= begin <= end <= move.elapsed_s * 1e3 + 50.0 for _, _, begin, end in every)
    # In one slot nothing overlaps; in different slots gathers and writes do.
    sent = sorted(bars["gather"] + bars["wait"] + bars["write"], key=lambda bar: (bar[0], bar[2], bar[3]))
    for one, next_one in itertools.pairwise(sent):
        assert one[0] != next_one[0] or one[3] <= next_one[2] + 0.002
    assert any(
        write[0] != gather[0] and write[2] < gather[3] and gather[2] < write[3]
        for write in bars["write"]
        for gather in bars["gather"]
    )


@pytest.mark.parametrize(("end_s", "ticks"), [(0.0023, "0 0.2 0.4 0.6 0.8 1 1.2 1.4 1.6 1.8 2 2.2"), (7.0, "0 1000")])
def test_the_axis_counts_milliseconds(end_s: float, ticks: str, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    draw_timeline(path, "a <title>", [Span("send, slot 0", "gather", 3, 0.0, end_s)])
    root = ElementTree.parse(path).getroot()
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    assert texts[0] == "a <title>"
    assert " ".join(text or "" for text in texts[5:-2]).startswith(ticks)
    assert texts[-2:] == ["ms", "send, slot 0"]
    assert len(texts) <= 5 + 13 + 2


def test_nothing_moved_is_drawn_too(tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    draw_timeline(path, "nothing", [])
    assert all(bars == [] for bars in _bars(path).values())


def test_a_plot_is_tried_before_the_run_and_leaves_no_trace(tmp_path: Path) -> None:
    fresh, old, directory = tmp_path / "fresh.svg", tmp_path / "old.svg", tmp_path / "directory.svg"
    old.write_text("old")
    directory.mkdir()
    for path in (fresh, old):
        check_plot(path, "")
    assert not fresh.exists()
    assert old.read_text() == "old"
    with pytest.raises(ConfigError, match=r"expected a file that can be written \(Is a directory\)"):
        check_plot(directory, "")


def test_a_disk_that_is_full_after_the_run_is_said() -> None:
    with pytest.raises(ConfigError, match="--plot: /dev/full cannot be written: No space left on device"):
        draw_timeline(Path("/dev/full"), "full", [])
