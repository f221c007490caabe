"""A whole qwen3_5 on the kernels of flash-linear-attention and ours equals the stock model on each sample
alone, in one process and over ranks.
"""

from __future__ import annotations

import pytest

from seqbraid import Mesh
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.ops import conv, gated_delta, gated_delta_fla, gated_delta_pieces
from seqbraid.verify.parity import check_parity
from tests.helpers import ranks
from tests.kernels.conftest import interpret

LENGTHS = (1, 65, 2, 150)
CHANGES = {
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def verdict(mesh: dict[str, int], mode: str) -> tuple[bool, object, int, int]:
    """On one rank: whether parity holds, its worst quantity, and how often the kernels were called."""
    calls = {"rule": 0, "convolution": 0}
    with pytest.MonkeyPatch.context() as patch:
        interpret(patch)
        rule, convolution = gated_delta_fla.FlaGatedDeltaCall.forward, conv._by_fla

        def counted_rule(self: object, initial: object) -> object:
            calls["rule"] += 1
            return rule(self, initial)

        def counted_convolution(*args: object) -> object:
            calls["convolution"] += 1
            return convolution(*args)

        patch.setattr(gated_delta_pieces, "SMALLEST_PIECE", 32)
        patch.setattr(gated_delta_fla.FlaGatedDeltaCall, "forward", counted_rule)
        patch.setattr(conv, "_by_fla", counted_convolution)
        # As on a GPU in 16 bits; the kernels take float32 too.
        patch.setattr(gated_delta, "_chosen", lambda k, v, *_: "fla" if len(v) else "torch")
        patch.setattr(conv, "_takes_fla", lambda x, weight, kernels: len(x) > 0)
        model = tiny_model("qwen3_5", **CHANGES)
        parity = check_parity(
            model, random_samples(LENGTHS, 97, seed=3), Mesh(**mesh), policy="zigzag", gated_delta=mode
        )
    return parity.holds, parity.worst, calls["rule"], calls["convolution"]


@pytest.mark.parametrize(
    ("mesh", "mode"), [({}, "auto"), ({"ring": 2}, "states"), ({"ring": 2, "ulysses": 2}, "states")]
)
def test_the_model(mesh: dict[str, int], mode: str) -> None:
    size = mesh.get("ring", 1) * mesh.get("ulysses", 1)
    for holds, worst, *calls in ranks.run(verdict, size, mesh, mode, limit=300.0):
        assert holds, worst
        assert min(calls) >= 1
