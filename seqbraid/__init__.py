"""seqbraid: long packed sequences over many devices, with the loss and the gradient of one.

>>> import seqbraid as sb
>>> sb.SequenceLayout([900, 300, 40], ring=2, ulysses=2).num_local_tokens
310
"""

from .data.pack import pack
from .layout import SequenceLayout
from .mesh import Mesh
from .models.batch import PackedBatch
from .models.braided import BraidedModel, StepOutput
from .ops.kernels import KernelOptions

# The function shadows the package of the same name on purpose: `seqbraid.parallelize` is what users call.
from .parallelize import parallelize
from .parallelize.memory import MemoryOptions

__version__ = "0.1.0.dev0"

__all__ = [
    "BraidedModel",
    "KernelOptions",
    "MemoryOptions",
    "Mesh",
    "PackedBatch",
    "SequenceLayout",
    "StepOutput",
    "pack",
    "parallelize",
]
