"""What a step costs before it is run: units of sharding, FLOPs, bytes, memory and its switches. Nothing here
runs a model; `distributed` and `train` act on what it says.
"""
