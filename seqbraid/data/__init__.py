"""Records in, packed rows out: `encode` makes a sample of a record, `pack` a row's shard of samples.

What they are made of lives in `records/`, `chat/` and `media/`; `stream/` decides which samples are in which
row of which step.
"""
