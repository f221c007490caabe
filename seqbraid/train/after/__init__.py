"""What becomes of a run: its model written for stock transformers with a model card, and talked to.

Everything here runs in one process, with the stock model's own `generate`.
"""
