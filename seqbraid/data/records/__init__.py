"""Records and where they come from: JSONL files, parquet and `datasets`, read at random by number.

A record in any accepted format is checked here and becomes a `Conversation`; an unknown key is refused by
its name.
"""
