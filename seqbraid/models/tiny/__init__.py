"""Tiny models of every supported family, made from configs, and random samples for them.

They serve `seqbraid verify`, runs on a laptop and the tests; `seqbraid.data.tiny` gives them processors.
"""
