"""Putting a model on the mesh."""

from .api import parallelize

__all__ = ["parallelize"]
