"""`seqbraid inspect`: what a run would be trained on, before it is.

`survey` measures samples, `findings` says what follows for the run, `packed` decodes a row, `terminal` and
`page` show it all. The samples go through the order, the encoder and the planner of a run.
"""
