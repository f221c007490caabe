"""Token mixers over the ranks that share a row, and the exchange of media features.

Softmax attention runs by Ulysses, ring or their product, the gated delta rule by state passing or by heads;
who exchanges what is planned from lengths alone.
"""
