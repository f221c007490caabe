"""Which samples are in which row of which step: the same on every rank, from data, seed and batch sizes.

Worker processes measure lengths and encode samples; `loader` yields the steps and can be resumed.
"""
