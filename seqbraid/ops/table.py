"""All ops whose kernel is chosen, and the kernels of a model."""

from __future__ import annotations

from dataclasses import replace

from .conv import CONVOLUTION
from .cross_entropy import LOSS
from .flash_impl import ATTENTION, names_flash_impl
from .gated_delta import RULE
from .grouped_linear import EXPERTS
from .kernels import AUTO, KernelOptions, Kernels, Op
from .merge import MERGE
from .rows import NORM, ROTARY
from .swiglu import SWIGLU

TABLE: tuple[Op, ...] = (ATTENTION, RULE, CONVOLUTION, MERGE, LOSS, NORM, ROTARY, SWIGLU, EXPERTS)


def make_kernels(options: KernelOptions | None, attn_implementation: str | None = None) -> Kernels:
    """The kernels of a model; an option that names a kernel which is not installed is refused.

    A model that was loaded with FlashAttention-3 or -4 asks for it by that.
    """
    options = KernelOptions() if options is None else options
    if options.attention == AUTO and attn_implementation and names_flash_impl(attn_implementation):
        options = replace(options, attention=attn_implementation)
    for op in TABLE:
        op.check(options)
    return Kernels(options)
