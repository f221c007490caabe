"""Putting a model on the mesh: sharding, and switches that trade time for memory.

`parallelize` does all of it, and is undone by the model's `release`.
"""

from .api import parallelize

__all__ = ["parallelize"]
