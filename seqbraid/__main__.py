"""`python -m seqbraid`, the same as `seqbraid`."""

from .cli import entry

entry()
