"""Collectives over a group of ranks: exchanges, reductions and consensus, with every byte counted.

Also how ranks meet, and how one that is gone is noticed; nothing here knows a model.
"""

from .group import Group

__all__ = ["Group"]
