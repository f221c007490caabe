"""Tiny models of every family that is known, made from configs, and random samples for them.

They serve `seqbraid verify`, dry runs on a laptop and the tests; `seqbraid.data.tiny` gives them processors.
"""
