"""Optimizers by class path: torch's own steps on any mesh, what they keep, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from seqbraid.distributed import parallelize
from seqbraid.mesh import Mesh
from seqbraid.models.braided import BraidedModel
from seqbraid.models.parts import ModelParts
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.train.optimizer import check_entries, make_optimizer, trained
from seqbraid.train.optimizers.kinds import OptimizerKind
from seqbraid.train.step_config import StepConfig
from tests.helpers.ranks import errors, run

STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "AdamW": {},
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "RMSprop": {"alpha": 0.9},
    "Adagrad": {"initial_accumulator_value": 0.5},  # makes its state when it is made
    "NAdam": {},
    "Muon": {"momentum": 0.8},
}


def config(name: str, **settings: Any) -> StepConfig:
    path = f"torch.optim.{name}"
    return StepConfig(
        lr=0.02, weight_decay=0.1, optimizer=path, optimizer_options=KINDS.get(name, {}), **settings
    )


def gradients(named: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    """The whole ones, the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(p.shape, generator=generator) for name, p in named.items()}


def stepped(name: str, axes: dict[str, int], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """The whole parameters after some steps of ours on a mesh."""
    mesh = Mesh(**axes)
    model = parallelize(tiny_model("qwen3_moe", 0).to(dtype), mesh)
    optimizer, named = make_optimizer(model, config(name)), trained(model)
    for step in range(STEPS):
        for key, whole in gradients(named, step).items():
            p = named[key]
            if isinstance(p, DTensor):
                # Each rank has the whole one; parts of what ep or tp has cut are cut again by FSDP.
                p.grad = distribute_tensor(whole.to(dtype), p.device_mesh, p.placements, src_data_rank=None)
            else:
                p.grad = whole.to(dtype)
        optimizer.step()
        optimizer.zero_grad()
    check_entries(optimizer)
    return {key: _whole(p) for key, p in named.items()}


def _whole(p: Tensor) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().float()


def all_stepped(axes: dict[str, int]) -> dict[str, dict[str, Tensor]]:
    return {name: stepped(name, axes) for name in KINDS}


@pytest.fixture(scope="module")
def wanted() -> dict[str, dict[str, Tensor]]:
    """Torch's own steps on the stock model."""
    return {name: _by_torch(name) for name in KINDS}


def _by_torch(name: str) -> dict[str, Tensor]:
    model, options = tiny_model("qwen3_moe", 0), {"lr": 0.02, **KINDS[name]}
    named = dict(model.named_parameters())
    matrices: dict[str, list[nn.Parameter]] = {}
    if name == "Muon":
        experts = {
            id(p) for layer in ModelParts.of(model).layers for m in layer.experts for p in m.parameters()
        }
        for key, p in named.items():
            if ".layers." in key and p.ndim == 2:
                matrices[key] = [p]
            elif id(p) in experts:
                matrices[key] = [nn.Parameter(one) for one in p.detach().clone()]
        assert any(len(found) > 1 for found in matrices.values()) and len(matrices) > 6
    rest = {key: p for key, p in named.items() if key not in matrices}
    groups = [
        {"params": [p for p in rest.values() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in rest.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, "AdamW" if matrices else name)
    used = [make(groups, **({"lr": 0.02} if matrices else options))]
    if matrices:
        every = [p for found in matrices.values() for p in found]
        used.append(torch.optim.Muon(every, weight_decay=0.1, adjust_lr_fn="match_rms_adamw", **options))
    for step in range(STEPS):
        for key, whole in gradients(named, step).items():
            if key not in matrices:
                named[key].grad = whole
            elif len(matrices[key]) == 1:
                matrices[key][0].grad = whole
            else:
                for p, own in zip(matrices[key], whole, strict=True):
                    p.grad = own
        for optimizer in used:
            optimizer.step()
    joined = {key: torch.stack(list(p)) if len(p) > 1 else p[0] for key, p in matrices.items()}
    return {key: joined.get(key, p).detach() for key, p in named.items()}


def check(found: dict[str, dict[str, Tensor]], wanted: dict[str, dict[str, Tensor]]) -> None:
    start = dict(tiny_model("qwen3_moe", 0).named_parameters())
    for name in KINDS:
        assert found[name].keys() == wanted[name].keys()
        for key, x in wanted[name].items():
            moved = (x - start[key]).norm()
            assert moved > 0 and (found[name][key] - x).norm() <= 1e-5 * moved, (name, key)


def test_one_process_steps_as_torch_does(wanted: dict[str, dict[str, Tensor]]) -> None:
    check(all_stepped({}), wanted)


@pytest.mark.parametrize(
    "axes",
    [
        {"dp_shard": 2, "tp": 2},
        {"dp_replicate": 2, "ring": 2, "ep": 2},
    ],
    ids=str,
)
def test_a_mesh_steps_as_torch_does_on_the_whole(
    axes: dict[str, int], wanted: dict[str, dict[str, Tensor]]
) -> None:
    for found in run(all_stepped, 4, axes):
        check(found, wanted)


def _narrow(axes: dict[str, int]) -> dict[str, Tensor]:
    return stepped("Muon", axes, torch.bfloat16)


def test_muon_has_master_weights_too() -> None:
    alone = run(_narrow, 1, {})[0]
    for found in run(_narrow, 2, {"ring": 2}):
        assert all(torch.equal(found[key], x) for key, x in alone.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sgd"}, r"'sgd' is no class path; give one such as torch\.optim\.SGD"),
        ({"optimizer": "torch.optim.Nothing"}, "cannot be imported: module 'torch.optim' has no attribute"),
        ({"optimizer": "torch.nn.Linear"}, "is no torch.optim.Optimizer"),
        (
            {"optimizer": "torch.optim.Adafactor"},
            r"keeps 'row_var' of shape \[6, 1\] for a parameter of shape",
        ),
        ({"optimizer": "torch.optim.LBFGS"}, "cannot be used: TypeError: .* 'closure'"),
        ({"optimizer": "torch.optim.SparseAdam"}, "does not support dense gradients"),
        ({"optimizer": "torch.optim.Rprop", "weight_decay": 0.1}, "takes none; set it to 0"),
        ({"optimizer_options": {"momentun": 0.9}}, "'momentun', which torch.optim.AdamW does not take"),
        ({"optimizer_options": {"lr": 0.9}}, "set train.lr instead"),
        ({"optimizer_options": {"eps": 0}}, "eps=0 makes nan of a parameter whose gradient is 0"),
        ({"optimizer": "torch.optim.Adagrad", "optimizer_options": {"eps": 0.0}}, "eps=0.0 makes nan"),
        ({"optimizer": "torch.optim.Muon", "optimizer_options": {"eps": 0.0}}, "give it an eps above 0"),
        ({"optimizer": "torch.optim.SGD", "beta2": 0.5}, "train.beta2=0.5 is for optimizers with betas"),
        ({"optimizer": f"{__name__}.Counted"}, "changes 'count' of its groups"),
        ({"optimizer": f"{__name__}.Shared"}, "keeps 'all' beside what it keeps for each parameter"),
    ],
)
def test_what_could_not_be_resumed_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OptimizerKind.of(StepConfig(**settings))


class Counted(torch.optim.SGD):
    """Counts its steps where no checkpoint looks."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1


class Shared(torch.optim.SGD):
    """Keeps something for all parameters together."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["all"] = {"count": 1}


class Normed(torch.optim.Optimizer):
    """Steps by the norm of a whole gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad / p.grad.norm(), alpha=group["lr"])


def _made(name: str, axes: dict[str, int]) -> None:
    make_optimizer(parallelize(tiny_model("llama", 0), Mesh(**axes)), StepConfig(optimizer=name))


def test_what_depends_on_how_a_parameter_is_cut_is_for_one_process() -> None:
    _made(f"{__name__}.Normed", {})
    for error in errors(_made, 2, f"{__name__}.Normed", {"ring": 2}):
        assert error.kind == "ValueError" and "does not work number by number" in error.message


def braided() -> BraidedModel:
    return parallelize(tiny_model("qwen3", 0))


def test_groups_by_name_have_their_rates_and_decay() -> None:
    groups = [{"match": "embed", "lr": 5e-4}, {"match": r"norm\.weight$", "lr": 0, "weight_decay": 0.5}]
    model = braided()
    optimizer = make_optimizer(model, StepConfig(lr=1e-3, weight_decay=0.1, groups=groups))
    of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, p in trained(model).items():
        lr, decay = (5e-4, 0.1) if "embed" in name else (0.0, 0.5) if "norm" in name else (1e-3, 0.1)
        assert (of[id(p)].get("peak_lr", 1e-3), of[id(p)]["weight_decay"]) == (lr, decay), name
    for wrong, message in (
        ([{"match": "no_such"}], "sets neither lr nor weight_decay"),
        ([{"match": "no_such", "lr": 1}], "matches no parameter that is trained"),
        ([{"match": "embed", "lr": 1, "wd": 1}], "unknown key 'wd'; use match, lr, weight_decay"),
        ([{"match": "(", "lr": 1}], "is no regular expression"),
        ([{"match": "embed", "lr": -1}], "must be at least 0 and finite"),
        ([{"lr": 1}], "give {match: REGEX"),
    ):
        with pytest.raises(ValueError, match=message):
            make_optimizer(model, StepConfig(groups=wrong))
    with pytest.raises(ValueError, match=r"which torch\.optim\.Rprop does not take"):
        settings = {"groups": [{"match": "embed", "weight_decay": 0.1}], "optimizer": "torch.optim.Rprop"}
        make_optimizer(model, StepConfig(**settings))


def test_muon_leaves_embeddings_head_and_vectors_to_adamw() -> None:
    model = braided()
    optimizer = make_optimizer(model, config("Muon"))
    names = {id(p): name for name, p in trained(model).items()}
    of_muon = {
        names[id(p)]
        for group, entries in zip(optimizer.param_groups, optimizer.entries, strict=True)
        for p in group["params"]
        if entries == {"momentum_buffer"}
    }
    assert of_muon == {n for n in names.values() if ".layers." in n and "proj" in n} and of_muon
    for p in model.parameters():
        p.requires_grad_("norm" in names.get(id(p), ""))
    with pytest.raises(ValueError, match="no matrix of a layer is trained"):
        make_optimizer(model, config("Muon"))
