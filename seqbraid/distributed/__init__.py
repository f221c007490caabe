"""Puts a model on the mesh: FSDP2, tensor, expert and pipeline parallelism, and switches that trade
time for memory.

`parallelize` does all of it; the model's `release` undoes it.
"""

from .api import parallelize

__all__ = ["parallelize"]
