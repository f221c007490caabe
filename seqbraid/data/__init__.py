"""Samples, and how they become rows."""
