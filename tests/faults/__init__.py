"""Real agents and workers as processes that are killed, stopped, restarted and cut off at named points of a transfer.

`python -m tests.faults --all` runs the whole matrix and prints a table; `python -m tests.faults.soak` runs for long.
"""
