"""Curves of runs as one HTML page."""
