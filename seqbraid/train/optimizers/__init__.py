"""What changes the weights: torch's optimizers by class path, on the parts of parameters that each rank has.

Which class may be used, how parameters are grouped, how a step is taken on a mesh, and Muon's whole matrices.
"""
