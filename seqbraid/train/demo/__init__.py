"""`seqbraid demo`: a tiny model learns to read digits, packed and split, beside the stock one.

What came of it is shown as one HTML page.
"""
