"""Which samples are in which row of which step: decided by all ranks alike, from data, seed and batch sizes.

Lengths are measured and samples encoded by worker processes; `loader` hands out the steps and can be resumed.
"""
