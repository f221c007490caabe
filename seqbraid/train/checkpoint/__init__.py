"""Checkpoints: written by all ranks, published at once, read by any mesh."""
