"""Kernels that take explicit boundaries; they know nothing of ranks.

For each op a table says which of them is taken on a device, and why not the others.
"""
