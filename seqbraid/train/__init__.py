"""`seqbraid train`: configuration, the training loop, metrics, and export to stock transformers.

Checkpoints, the report of a run and the demo have rooms of their own.
"""
