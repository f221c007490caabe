"""Proof on the user's own model: parity with the stock model, and mutants that a check must catch."""
