"""Stock models on a mesh: what their modules compute instead, and `BraidedModel`, which runs a step.

What is particular to a family of media models is in `families/`; tiny models for checks are in `tiny/`.
"""
