"""How a command of this room ends on a machine with fewer GPUs than it takes."""

from __future__ import annotations

import argparse

import torch

QUICK = "; --quick tries the command without them"


def check_gpus(parser: argparse.ArgumentParser, num_gpus: int, remedy: str = "") -> None:
    """End the command with status 2 and a sentence, of which `remedy` is the end, where fewer GPUs are to be seen."""
    found = torch.cuda.device_count()
    if found < num_gpus:
        parser.error(f"got {found} GPUs, expected at least {num_gpus}{remedy}")
