"""`seqbraid demo`: a tiny model learns to read digits from packed, split rows, beside the stock model.

The result is written as one HTML page.
"""
