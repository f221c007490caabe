"""`seqbraid verify`: loss, logits and gradients against the stock model's, on the user's model and mesh.

Errors are judged against a noise floor; mutants are deliberate bugs, each of which the checks must catch.
"""
