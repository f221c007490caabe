"""The stock models on a mesh: what their modules do instead, and `BraidedModel`, which runs a step.

What is particular to families of media models is in `families/`, models made for checks are in `tiny/`.
"""
