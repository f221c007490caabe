"""`seqbraid train`: configuration, the training loop, metrics, and export to stock transformers.

Optimizers, checkpoints, what is shown before a run (`inspect/`) and of it (`report/`), what comes after it
(`after/`) and the demo have rooms of their own.
"""
