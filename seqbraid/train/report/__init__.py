"""`seqbraid report`: the metrics of runs, read and compared, as one HTML page with curves.

It needs neither torch nor transformers.
"""
