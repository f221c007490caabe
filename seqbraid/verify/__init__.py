"""`seqbraid verify`: loss, logits and gradients beside the stock model's, on the user's model and mesh.

Mutants are deliberate defects, each of which a check must catch; verdicts are given beside a noise floor.
"""
