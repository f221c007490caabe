"""`seqbraid bench`: what this machine can do with a model, found by trying.

Steps of the model itself, with random weights and a few of its layers where all of them would take too long.
"""
