"""`seqbraid train`: configuration, the loop, metrics, export of what stock transformers loads.

Checkpoints, the report of a run and the demo have rooms of their own.
"""
