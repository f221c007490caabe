"""What a step costs before it is run: FLOPs, bytes, memory and its switches, units of sharding, and where
pipeline stages are cut.

Nothing here runs a model; `distributed` and `train` act on what it says.
"""
