"""Losses of your own, each exact on any mesh; `compare.py` holds them against plain code in one process."""
