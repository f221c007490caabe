"""Training: for now, the demo."""
