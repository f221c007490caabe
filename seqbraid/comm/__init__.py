"""Collectives over a group of ranks: exchanges, reductions and consensus, with every byte counted."""

from .group import Group

__all__ = ["Group"]
