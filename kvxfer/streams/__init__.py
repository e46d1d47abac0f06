"""Rows moved by a stream: a GPU's or, where there is none, a thread that keeps the same contract.

The agent writes orders into a ring of words and tables (`ring`); the stream, which belongs to whoever may touch the
pool, waits for each, moves the rows and raises a word (`row_stream`, `cuda_stream`). Nobody wakes anybody.
"""
