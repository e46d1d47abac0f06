"""`kvxfer keygen`: the keys of one agent."""

from __future__ import annotations

import sys
from pathlib import Path

from kvxfer.cli.output import print_json
from kvxfer.control.auth import write_secret_key
from kvxfer.control.peer_channel import new_keys


def make_keys(path: Path, as_json: bool) -> None:
    """Write a new secret key into the new file `path` and print its public key. Raises `ConfigError`."""
    keys = new_keys()
    write_secret_key(path, keys)
    if as_json:
        print_json({"public_key": keys.public, "key_file": str(path)})
        return
    # The key alone, so that `kvxfer keygen >> allowed-keys` is all it takes.
    sys.stdout.write(f"{keys.public}\n")
    sys.stderr.write(f"secret key in {path}; put the public one into allowed_keys_file of the agents it talks to\n")
