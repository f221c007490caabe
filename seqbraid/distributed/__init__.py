"""Putting a model on the mesh: sharding, and switches that trade time for memory."""

from .api import parallelize
from .memory import MemoryOptions

__all__ = ["MemoryOptions", "parallelize"]
