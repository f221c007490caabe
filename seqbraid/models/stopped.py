"""A forward that raised: FSDP2 has no word for it, and would go on as if it still ran."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule


@contextmanager
def anew_if_it_stops(model: nn.Module) -> Iterator[None]:
    """Around a forward: where it raises, the next one finds the model as if this one had not begun."""
    try:
        yield
    except BaseException:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                _begin_anew(module)
        raise


def _begin_anew(module: FSDPModule) -> None:
    # What was gathered stays so until a forward is over, and the first unit that is called takes care of the
    # optimizer's last step for all others: who is first is forgotten at the end of a forward alone.
    state: Any = module._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)  # since torch 2.12
    groups = [state._fsdp_param_group] if several is None else several
    for part in (state, *groups):
        if part is not None:
            part._training_state = type(part._training_state).IDLE
    state._state_ctx.iter_forward_root = None
    module.reshard()
