"""`kvxfer`, run as a part of a demo or bench: gets SIGTERM when its parent dies, so that nothing is left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from kvxfer.cli.main import main

_PR_SET_PDEATHSIG = 1  # linux/prctl.h

if __name__ == "__main__":
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it died before the call
        sys.exit(1)
    main()
