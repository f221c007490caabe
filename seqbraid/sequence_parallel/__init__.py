"""Token mixers over the ranks that share a row, and the features of media on their way to the tokens' ranks.

Softmax attention goes by Ulysses, the ring or their product, the gated delta rule by state passing or by
heads; who exchanges what is planned from lengths alone.
"""
