"""Checkpoints: written by all ranks, published by one rename, read by any mesh.

Every file has a checksum, and nothing in them is unpickled.
"""
