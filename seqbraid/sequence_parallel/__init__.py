"""Token mixers over the ranks that share a row: Ulysses, the ring, and their product."""
