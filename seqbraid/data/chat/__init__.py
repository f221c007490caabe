"""Conversations through the chat template of the model.

Here it is decided which characters of the text belong to which turn, and which of them the loss covers.
"""
