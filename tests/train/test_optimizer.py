"""Steps on float32 copies, and the norm of the whole gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from seqbraid.distributed import parallelize
from seqbraid.distributed.gradients import clip_gradients, gradient_norm
from seqbraid.mesh import Mesh
from seqbraid.models.tensor_parts import own_part
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.train.config import StepConfig
from seqbraid.train.optimizer import (
    make_optimizer,
)
from seqbraid.train.optimizers.partwise import PartwiseOptimizer
from tests.helpers.ranks import run

CONFIG = StepConfig(lr=1e-3, weight_decay=0.1, beta2=0.95)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5))


def test_matrices_decay_and_vectors_do_not() -> None:
    optimizer = make_optimizer(model(), CONFIG)
    assert [(len(g["params"]), g["weight_decay"]) for g in optimizer.param_groups] == [(1, 0.1), (3, 0.0)]
    frozen = model().requires_grad_(False)
    with pytest.raises(ValueError, match="nothing is trained"):
        make_optimizer(frozen, CONFIG)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16], ids=str)
def test_two_steps_by_hand(kind: torch.dtype) -> None:
    """Every setting is unlike its default, and eps is as large as the gradients."""
    settings = StepConfig(lr=0.25, weight_decay=0.5, beta1=0.75, beta2=0.5, eps=2.0)
    module = nn.Linear(1, 1, bias=False).to(kind)
    with torch.no_grad():
        module.weight.fill_(4.0)
    optimizer = make_optimizer(module, settings)
    weight, first, second = 4.0, 0.0, 0.0
    for step, gradient in ((1, 3.0), (2, -1.0)):
        module.weight.grad = torch.full_like(module.weight, gradient)
        optimizer.step()
        optimizer.zero_grad()
        first = 0.75 * first + 0.25 * gradient
        second = 0.5 * second + 0.5 * gradient**2
        move = first / (1 - 0.75**step) / ((second / (1 - 0.5**step)) ** 0.5 + 2.0)
        weight -= 0.25 * (0.5 * weight + move)
    assert module.weight.item() == pytest.approx(weight, rel=1e-6 if kind == torch.float32 else 4e-3)


def test_clipping_never_makes_a_gradient_larger() -> None:
    for largest, wanted in ((10.0, [3.0, 4.0]), (5.0, [3.0, 4.0]), (None, [3.0, 4.0]), (1.0, [0.6, 0.8])):
        gradients = [torch.tensor([3.0]), torch.tensor([4.0])]
        clip_gradients(gradients, 5.0, largest)
        assert torch.cat(gradients).tolist() == pytest.approx(wanted), largest


def test_master_weights_step_as_float32_ones_do() -> None:
    """Small steps would be lost in bfloat16; parameters are the float32 ones rounded, after every step."""
    wide, narrow = model().bfloat16().float(), model().bfloat16()
    plain, master = make_optimizer(wide, CONFIG), make_optimizer(narrow, CONFIG)
    assert master.has_masters and not plain.has_masters
    for group in (*plain.param_groups, *master.param_groups):
        group["lr"] = 1e-5
    before = [p.clone() for p in narrow.parameters()]
    generator = torch.Generator().manual_seed(1)
    for _ in range(50):
        for _ in range(2):  # micro-batches: their sum must not be rounded
            for p, q in zip(wide.parameters(), narrow.parameters(), strict=True):
                gradient = torch.randn(p.shape, generator=generator).bfloat16()
                p.grad = gradient.float() if p.grad is None else p.grad + gradient.float()
                q.grad = gradient
            master.gather_gradients()
        assert all(
            torch.equal(a, b)
            for a, b in zip(list(plain.gradients().values()), _in_order(master, narrow), strict=True)
        )
        plain.step()
        master.step()
        plain.zero_grad()
        for p, q in zip(wide.parameters(), narrow.parameters(), strict=True):
            assert torch.equal(p, master.state[q]["master"]) and torch.equal(p.bfloat16(), q)
    assert any(not torch.equal(p, q) for p, q in zip(before, narrow.parameters(), strict=True))
    assert not master.gradients() and all(q.grad is None for q in narrow.parameters())


def _in_order(optimizer: PartwiseOptimizer, module: nn.Module) -> list[Tensor]:
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in trained} == {id(p) for p in module.parameters()}
    return [optimizer.gradients()[p] for p in trained]


def _norm_and_clipped(axes: dict[str, int]) -> tuple[float, float, float]:
    """The norm as computed, from gathered gradients, and after clipping to 0.1."""
    mesh = Mesh(**axes)
    braided = parallelize(tiny_model("llama", 0), mesh)
    generator = torch.Generator().manual_seed(2)
    for p in braided.parameters():
        whole = torch.randn(p.shape, generator=generator)
        p.grad = torch.zeros_like(p)
        if hasattr(p.grad, "device_mesh"):
            from torch.distributed.tensor import distribute_tensor

            p.grad = distribute_tensor(whole, p.grad.device_mesh, p.grad.placements)
        else:
            p.grad.copy_(whole)
    optimizer = make_optimizer(braided, CONFIG)
    gradients = list(optimizer.gradients().values())
    found = gradient_norm(gradients, mesh)
    whole_norm = float(torch.cat([_full(g).flatten().double() for g in gradients]).norm())
    clip_gradients(gradients, found, 0.1)
    assert own_part(gradients[0]).numel() <= gradients[0].numel()
    return found, whole_norm, gradient_norm(gradients, mesh)


def _full(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


@pytest.mark.parametrize(
    "axes", [{"dp_replicate": 2, "ring": 2}, {"dp_shard": 2, "ulysses": 2}, {"ring": 4}], ids=str
)
def test_the_norm_is_that_of_the_whole_gradient(axes: dict[str, int]) -> None:
    alone = run(_norm_and_clipped, 1, {})[0][0]
    for found, whole, clipped in run(_norm_and_clipped, 4, axes):
        assert found == pytest.approx(whole, rel=1e-6) and found == pytest.approx(alone, rel=1e-6)
        assert clipped == pytest.approx(0.1, rel=1e-6)
