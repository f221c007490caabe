"""Records and where they come from: JSON lines, arrays, tables, compressed files, `datasets` and the Hub, one
source or several mixed by weights, read at random by number.

A record of any format in `formats` is checked here and becomes a `Conversation`, a `Document`, a `Completion`
or `Tokens`; an unknown key is refused by its name.
"""
