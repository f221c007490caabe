"""What tests share: a pool of ranks, two hosts, GPUs that are not there, media made on the spot, a toy source
and plain references to hold results against. Nothing here is a test.
"""
