"""Collectives over a group of ranks: exchanges, reductions and consensus, with every byte counted.

Also how ranks find each other, and how a rank that is gone is noticed; nothing here knows a model.
"""

from .group import Group

__all__ = ["Group"]
