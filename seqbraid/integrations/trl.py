"""`SFTTrainer`: TRL's preparation of data (templates, label masks, vision), and our steps on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import trl

from ..mesh import Mesh
from ..models.agreement import Agreed
from ..models.braided import BraidedModel
from ..models.output import StepOutput
from ..plan.memory import MemoryOptions
from .braiding import OWN, Braiding
from .transformers import Trainer


class SFTTrainer(trl.SFTTrainer, Trainer):
    """TRL's SFTTrainer for a model on any mesh.

    Data sets (`messages`, prompt and completion, text, vision, tokenized ones), `assistant_only_loss` and
    `completion_only_loss` are TRL's own. `packing=True` packs whole samples into rows of `max_length` tokens,
    by our packer.

    Args:
        model: a name, a stock model, a `PeftModel`, or what `parallelize` gave.
        args: `SFTConfig`; what cannot be kept is refused by name.
        mesh, memory: see `seqbraid.integrations.transformers.Trainer`, which lists what else there is.
        stock: the other arguments of TRL's SFTTrainer.
    """

    def __init__(
        self,
        model: Any,
        args: Any = None,
        *positional: Any,
        mesh: Mesh | None = None,
        memory: MemoryOptions | None = None,
        **stock: Any,
    ) -> None:
        ours = {name: stock.pop(name) for name in OWN if name in stock}
        row_tokens = None if args is None else packed_tokens(args)
        self.braiding = Braiding(mesh, row_tokens, memory=memory, **ours)
        if isinstance(model, BraidedModel):
            if stock.get("peft_config") is not None:
                raise ValueError(
                    "peft_config adds adapters to a model that is on the mesh already; pass the stock model "
                    "and mesh=, or add the adapters before parallelize"
                )
            self.braiding, model = replace(self.braiding, braided=model), model.model
        super().__init__(model, args, *positional, **stock)
        vars(self.model).pop("forward", None)  # TRL's, which computes log-probabilities in place of logits

    def _prepare_dataset(
        self, dataset: Any, processing_class: Any, args: Any, packing: bool, *others: Any, **named: Any
    ) -> Any:
        """TRL's preparation but for its packing."""
        return super()._prepare_dataset(dataset, processing_class, args, False, *others, **named)

    def observe(self, out: StepOutput, agreed: Agreed) -> None:
        """The metrics that TRL logs."""
        found = self._metrics["train"]
        self._total_train_tokens += agreed.counts["tokens"]
        found["num_tokens"] = [self._total_train_tokens]
        found["mean_token_accuracy"].append(int(out.correct_tokens) / max(1, out.label_tokens))
        if out.aux_loss is not None:
            found["aux_loss"].append(float(out.aux_loss))


def packed_tokens(args: Any) -> int | None:
    """The tokens of a row, where `args` ask for packing; refuses what TRL would do with samples on the way.

    >>> from types import SimpleNamespace
    >>> packed_tokens(SimpleNamespace(packing=True, packing_strategy="bfd", max_length=512, loss_type="nll"))
    512
    """
    for name, (allowed, reason) in REFUSED.items():
        value = getattr(args, name, None)
        if value not in allowed:
            raise ValueError(f"{name}={value!r} is not supported: {reason}")
    if not getattr(args, "packing", False):
        return None
    if args.packing_strategy != "bfd":
        raise ValueError(
            f"packing_strategy={args.packing_strategy!r} cuts samples in pieces, which see nothing of each "
            "other; use 'bfd': whole samples are packed into rows of max_length tokens"
        )
    if args.max_length is None:
        raise ValueError("packing=True needs max_length, the number of tokens of a row")
    return int(args.max_length)


REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "loss_type": ((None, "nll"), "the loss is cross entropy; pass loss= for one of your own"),
    "activation_offloading": ((None, False), "pass memory=seqbraid.MemoryOptions('full', offload=True)"),
}
"""Arguments of `SFTConfig`, the values that can be kept, and what to do for others."""
