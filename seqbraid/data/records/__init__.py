"""Where records come from, and what one says: JSONL files and `datasets`, read by number.

A record of any accepted style is checked here and brought to one form, the `Conversation`; a key that is not
known is refused by its name.
"""
