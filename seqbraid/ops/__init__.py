"""Kernels that take explicit sequence boundaries; they know nothing of ranks.

For each op a table says which kernel is used on a device, and why not the others.
"""
