"""Kernels that take explicit boundaries; they know nothing of ranks."""
