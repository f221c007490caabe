"""Other people's trainers around a `BraidedModel`: the Trainer of transformers and the SFTTrainer of TRL.

`transformers.py` and `trl.py` need the libraries that they are named after, and are imported by name. Nothing
else of the package imports this room.
"""
