"""The head of a stock decoder: a plain linear layer on the decoder's output, or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

FSDP = "torch.distributed.fsdp."

T = TypeVar("T")


def find_head(model: PreTrainedModel) -> nn.Linear:
    """The linear layer whose weight the loss reads."""
    head = model.get_output_embeddings()
    refuse_adapter(head, f"the head of {type(model).__name__}")
    if not isinstance(head, nn.Linear):
        raise ValueError(
            f"{type(model).__name__} has no linear language-model head (found {type(head).__name__}); load "
            "the model with its ForCausalLM class"
        )
    check_plain_head(head, type(model).__name__)
    return head


def check_plain_head(head: nn.Linear, name: str) -> None:
    """The loss reads the head's weight: whatever else its call would do is not seen."""
    own = type(head).forward is not nn.Linear.forward or "forward" in vars(head)
    if "weight" not in head._parameters:
        raise ValueError(
            f"the weight of the head of {name} is computed from other parameters (by a parametrization "
            "of torch's, for example); the loss reads the head's weight: only a plain linear head can be used"
        )
    if own or has_hooks(head):
        what = f"a forward of its own ({type(head).__name__})" if own else "forward hooks"
        raise ValueError(
            f"the head of {name} has {what}; the loss uses the head's weight directly and would ignore "
            "that: only a plain linear head is supported"
        )


def has_hooks(module: nn.Module) -> bool:
    """Whether calls of a module do more than its forward; a sharded one gathers its weights around it."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return any(not getattr(hook, "__module__", "").startswith(FSDP) for hook in hooks)


def call_with_head(head: nn.Linear, function: Callable[[Tensor, nn.Linear], T], hidden_TD: Tensor) -> T:
    """Call a function of hidden states and the head, as one call of the head: a sharded head gathers its
    weight around its calls, so that the function has it at hand, however often it reads it.
    """

    def inside(hidden_TD: Tensor) -> T:
        plain = nn.Linear(head.in_features, head.out_features, head.bias is not None, device="meta")
        plain.weight, plain.bias = head.weight, head.bias
        return function(hidden_TD, plain)

    with forward_replaced(head, inside):
        found: T = head(hidden_TD)
    return found


def refuse_adapter(module: nn.Module | None, what: str) -> None:
    """A wrapper of peft answers `.weight` with the weight it wraps: what it adds would be left out."""
    if hasattr(module, "base_layer") or hasattr(module, "original_module"):
        raise ValueError(
            f"{what} has an adapter ({type(module).__name__} of {type(module).__module__}), which would "
            "be ignored, since its weight is used directly: adapters may be on the linear layers of the "
            "decoder and the media encoders"
        )


class _FakeOutput(BaseModelOutputWithPast):
    """A decoder's output that has nothing but hidden states, whatever else the family would look for."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def check_nothing_around(model: PreTrainedModel, decoder: nn.Module, head: nn.Linear) -> None:
    """See with made-up tensors that the model's logits are its head on the decoder's output and nothing else.

    Soft-caps, scales and extra layers around the head differ from family to family and release to
    release; calling the stock forward with the decoder and the head stubbed shows any of them, without
    touching a weight.
    """
    weight = model.get_input_embeddings().weight
    device = torch.device("cpu") if weight.is_meta else weight.device
    random = torch.Generator(device).manual_seed(0)  # of its own: the user's goes on as if we were not here
    hidden, logits = (
        torch.randn(1, 2, size, generator=random, dtype=weight.dtype, device=device)
        for size in (head.in_features, 5)
    )
    given: list[Tensor] = []

    def fake_head(x: Tensor) -> Tensor:
        given.append(x)
        return logits

    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(forward_replaced(head, fake_head))
        stack.enter_context(forward_replaced(decoder, lambda *_, **__: _FakeOutput(last_hidden_state=hidden)))
        # A media model embeds its tokens before the decoder.
        ids = torch.zeros(1, 2, dtype=torch.long, device=weight.device)
        try:
            found = model(input_ids=ids, use_cache=False).logits
        except Exception as error:
            raise ValueError(
                f"the forward of {type(model).__name__} needs more of its decoder than hidden states "
                f"({type(error).__name__}: {error}); only a decoder with a plain linear head is supported"
            ) from error
    if len(given) != 1 or not torch.equal(given[0], hidden) or not torch.equal(found, logits):
        raise ValueError(
            f"{type(model).__name__} changes hidden states before its head or logits after it (a soft-cap "
            "or a scale); only a plain linear head is supported"
        )


@contextmanager
def forward_replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module's calls take another way; afterwards it is as it was."""
    before = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
