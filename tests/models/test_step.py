"""A step is prepared with no word to another rank, agreed on once, and run as batches one by one are."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import seqbraid as sb
from seqbraid import BadBatch, Mesh, Step, forward_backward
from seqbraid.models.needs import mixer_needs
from seqbraid.models.step import agree_on
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.sequence_parallel.plans import RowPlans
from tests.helpers import ranks

COLLECTIVES = ("all_gather", "all_gather_object", "all_reduce", "barrier", "broadcast", "all_to_all_single")
LENGTHS = ([64, 7], [1, 30, 5], [40])


def rows(seed: int = 0) -> list[list[dict[str, Any]]]:
    return [random_samples(lengths, 97, seed=seed + i) for i, lengths in enumerate(LENGTHS)]


def gradients(model: sb.BraidedModel) -> dict[str, Tensor]:
    found = {}
    for name, p in model.model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        found[name] = (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()
        p.grad = None
    return found


def both_ways(**axes: int) -> float:
    """How far gradients of `forward_backward` are from those of `model(batch)`, batch by batch."""
    mesh = Mesh(**axes)
    model = sb.parallelize(tiny_model("qwen3_moe", output_router_logits=True), mesh)
    batches = [sb.pack(row, model.model.config, mesh) for row in rows(10 * mesh.data_rank)]
    step = forward_backward(model, Step(batches, {"rows": 3}))
    of_step = gradients(model)
    outs = []
    for batch in batches:
        outs.append(model(batch, label_tokens=step.label_tokens))
        outs[-1].loss.backward()
    of_batches = gradients(model)
    assert step.batch_losses is not None and step.aux_loss is not None
    torch.testing.assert_close(step.batch_losses.float(), torch.stack([out.mean_loss for out in outs]))
    torch.testing.assert_close(step.mean_loss, sum(out.mean_loss for out in outs))
    torch.testing.assert_close(step.aux_loss, sum(out.aux_loss for out in outs))
    assert step.correct_tokens == sum(int(out.correct_tokens) for out in outs)
    assert not step.loss.requires_grad
    return max(float((of_step[name] - g).norm() / g.norm()) for name, g in of_batches.items())


@pytest.mark.parametrize("axes", [{}, {"ring": 2}, {"dp_shard": 2, "ulysses": 2}], ids=str)
def test_a_step_gives_what_its_batches_give_one_by_one(axes: dict[str, int]) -> None:
    size = sb.mesh.prod(axes.values())
    assert max(ranks.run(both_ways_of, size, axes) if size > 1 else [both_ways()]) < 1e-5


def both_ways_of(axes: dict[str, int]) -> float:
    return both_ways(**axes)


def collectives_of_a_step(micro_batches: int) -> list[str]:
    """What is called on the CPU group between a step at hand and the update, by a model whose own exchanges
    have groups of their own.
    """
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batches = [
        sb.pack(random_samples([9, 4], 97, seed=i), model.model.config, mesh) for i in range(micro_batches)
    ]
    forward_backward(model, batches[:1])  # what is made once is made here
    called: list[str] = []

    def counted(name: str) -> Any:
        right = getattr(dist, name)

        def count(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("group") in (mesh.cpu_group, None):
                called.append(name)
            return right(*args, **kwargs)

        return patch.object(dist, name, count)

    patches = [counted(name) for name in COLLECTIVES]
    for one in patches:
        one.start()
    forward_backward(model, Step(batches, {"tokens": 13}))
    for one in patches:
        one.stop()
    return called


def test_ranks_agree_once_whatever_the_number_of_micro_batches() -> None:
    """The other exchange is the sum of what was measured, for the log."""
    one, eight = (ranks.run(collectives_of_a_step, 2, n) for n in (1, 8))
    assert one == eight
    assert all(called.count("all_gather") == 1 and len(called) <= 2 for called in one)


def pack_beside_a_forbidden_network(bad: bool) -> tuple[str, bool]:
    """Every way to another rank fails while `pack` runs."""
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("qwen3_5"), mesh)
    forbidden = [patch.object(dist, name, side_effect=AssertionError(name)) for name in COLLECTIVES]
    for one in forbidden:
        one.start()
    batch = sb.pack([{"input_ids": [5, 500 if bad and mesh.rank else 7]}], model.model.config, mesh)
    for one in forbidden:
        one.stop()
    copied = pickle.loads(pickle.dumps(batch))
    try:
        model(copied)
    except ValueError as error:
        return str(error), isinstance(copied, BadBatch)
    return "", isinstance(copied, BadBatch)


def test_pack_asks_no_rank_and_a_bad_sample_is_raised_by_the_step_on_all() -> None:
    assert ranks.run(pack_beside_a_forbidden_network, 2, False) == [("", False)] * 2
    first, second = ranks.run(pack_beside_a_forbidden_network, 2, True)
    assert second == (second[0], True) and second[0].startswith("sample 0: input_ids holds 500, outside")
    assert first == (f"rank 1 stopped: {second[0]}", False)


def test_whoever_looks_at_a_bad_batch_hears_why() -> None:
    bad: Any = sb.pack([{"input_ids": []}], tiny_model("llama").config, Mesh(ring=2, rank=1, world_size=2))
    assert bad.to("cpu") is bad
    with pytest.raises(ValueError, match="sample 0 is empty"):
        bad.label_tokens  # noqa: B018
    with pytest.raises(ValueError, match="sample 0 is empty"):
        sb.pack([{"input_ids": []}], tiny_model("llama").config)


class Rows(Dataset[list[dict[str, Any]]]):
    """Four rows, of which the third has an id that there is not."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [3, 1, 4, 1, 5 if index != 2 else 500]}


class Collate:
    """What a user writes: `pack` with the model's config and the mesh."""

    def __init__(self, config: Any, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh

    def __call__(self, samples: Sequence[dict[str, Any]]) -> Any:
        return sb.pack(samples, self.config, self.mesh)


def through_a_data_loader() -> list[str]:
    """The labels of each batch, or why there are none; every rank goes through all of them."""
    multiprocessing_may_have_children()
    mesh = Mesh(ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    # Through a pickle, as where workers are spawned: a mesh whose groups are made goes along.
    collate = pickle.loads(pickle.dumps(Collate(model.model.config, mesh)))
    loader = DataLoader(
        Rows(), batch_size=1, collate_fn=collate, num_workers=2, multiprocessing_context="fork"
    )
    found = []
    for batch in loader:
        try:
            found.append(str(model(batch).label_tokens))
        except ValueError as error:
            found.append(str(error))
    return found


def multiprocessing_may_have_children() -> None:
    """The pool's processes are daemons, which may have none."""
    import multiprocessing

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]


def test_pack_collates_in_the_workers_of_a_data_loader() -> None:
    for found in ranks.run(through_a_data_loader, 2):
        assert [found[0], found[1], found[3]] == ["4"] * 3
        assert "sample 0: input_ids holds 500, outside the vocabulary of 97" in found[2]


def test_a_data_loader_of_one_process_raises_at_once() -> None:
    collate = Collate(tiny_model("llama").config, Mesh(rank=0, world_size=1))
    loader = iter(DataLoader(Rows(), batch_size=1, collate_fn=collate, num_workers=2))
    assert [next(loader).label_tokens for _ in range(2)] == [4, 4]
    with pytest.raises(ValueError, match="input_ids holds 500, outside the vocabulary"):
        next(loader)


def what_one_rank_tells(rank_that_stops: int) -> tuple[int, dict[str, int], bool]:
    mesh = Mesh(dp_shard=2, ring=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batches = [sb.pack(random_samples([8, 3], 97, ignored="none"), model.model.config, mesh)] * 2
    counts = {"tokens": 11 + mesh.data_rank, "rows": 2}
    agreed = agree_on(model, Step(batches, counts), flag=mesh.rank == rank_that_stops)
    return agreed.label_tokens, agreed.counts, agreed.flag


def test_counts_are_summed_over_data_ranks_and_any_rank_may_raise_the_flag() -> None:
    for stops in (0, 3):
        found = ranks.run(what_one_rank_tells, 4, stops)
        assert found == [(2 * 2 * 9, {"tokens": 23, "rows": 4}, True)] * 4
    assert not any(flag for *_, flag in ranks.run(what_one_rank_tells, 4, -1))


def other_number_of_micro_batches() -> None:
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([8], 97), model.model.config, mesh)
    forward_backward(model, [batch] * (1 + mesh.rank))


def other_divisor() -> None:
    mesh = Mesh(dp_shard=2)
    model = sb.parallelize(tiny_model("llama"), mesh)
    batch = sb.pack(random_samples([8], 97), model.model.config, mesh)
    forward_backward(model, [batch], divisor=7 + mesh.rank)


def window_that_one_row_is_cut_by() -> None:
    mesh = Mesh(dp_shard=2, ring=2)
    model = sb.parallelize(tiny_model("gemma3", sliding_window=16), mesh)
    forward_backward(
        model, [sb.pack(random_samples([200 if mesh.data_rank else 9], 97), model.model.config, mesh)]
    )


@pytest.mark.parametrize(
    ("function", "size", "message"),
    [
        (other_number_of_micro_batches, 2, "rank 1 has the number of micro-batches = 2 but rank 0 has 1"),
        (
            other_divisor,
            2,
            "forward_backward with divisor=8' but rank 0 has 'forward_backward with divisor=7'",
        ),
        (window_that_one_row_is_cut_by, 4, "sliding window of 16; use ulysses instead of ring"),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_refused_on_every_rank(function: Any, size: int, message: str) -> None:
    for error in ranks.errors(function, size, limit=20):
        assert error.kind == "ValueError" and message in error.message


def squared_hidden_states(seed: int, axis: str) -> tuple[float, list[Tensor]]:
    """A loss of the user's own, that plain code gives too: the sum of squares at label tokens, per sample."""
    mesh = Mesh(**{axis: 2})
    model = sb.parallelize(tiny_model("llama"), mesh)

    def loss(tokens: sb.LocalTokens) -> Tensor:
        return tokens.hidden[tokens.labelled].square().sum()

    batches = [sb.pack(row, model.model.config, mesh) for row in rows(seed)]
    out = forward_backward(model, batches, loss=loss, divisor=5)
    return float(out.mean_loss), list(gradients(model).values())


@pytest.mark.parametrize("axis", ["ring", "tp"])
def test_a_loss_of_the_users_own_is_divided_once(axis: str) -> None:
    stock = tiny_model("llama")
    total = torch.zeros(())
    for sample in (sample for row in rows(3) for sample in row):
        hidden = stock.model(input_ids=sample["input_ids"][None], use_cache=False).last_hidden_state[0]
        total = total + hidden[:-1][sample["labels"][1:] != -100].square().sum() / 5
    total.backward()
    wanted = {name: p.grad for name, p in stock.named_parameters()}
    for mean, found in ranks.run(squared_hidden_states, 2, 3, axis):
        assert mean == pytest.approx(total.item(), rel=1e-5)
        for (name, grad), got in zip(wanted.items(), found, strict=True):
            if grad is None:  # the head, which this loss has no use for
                assert not got.any(), name
            else:
                assert (got - grad).norm() < 1e-5 * grad.norm(), name


def test_without_gradients_a_step_is_an_evaluation() -> None:
    model = sb.parallelize(tiny_model("llama"))
    batches = [sb.pack(row, model.model.config) for row in rows()]
    with torch.no_grad():
        seen = forward_backward(model, batches)
    assert all(p.grad is None for p in model.parameters())
    assert seen.mean_loss == forward_backward(model, batches).mean_loss


def test_a_step_has_micro_batches() -> None:
    with pytest.raises(ValueError, match="the step has no micro-batches"):
        forward_backward(sb.parallelize(tiny_model("llama")), [])


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
@pytest.mark.parametrize("axes", [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_layers_ask_for_no_plan_that_pack_has_not_made(family: str, axes: tuple[int, int]) -> None:
    """All that a step needs is there before it: what a layer asks for then is found, not made."""
    ring, ulysses = axes
    config = tiny_model(family).config
    lengths = [15, 3, 1] if family == "gemma3" else [200, 3, 60, 1]
    mesh = Mesh(ring=ring, ulysses=ulysses, rank=ring * ulysses - 1, world_size=ring * ulysses)
    plans = pickle.loads(pickle.dumps(sb.pack(random_samples(lengths, 97), config, mesh).plans))
    made = {name: set(found) for name, found in vars(plans).items() if name.startswith("_")}
    again = RowPlans(plans.layout, plans.rank)
    again.prepare(mixer_needs(config, getattr(config, "layer_types", None)))
    assert {name: set(found) for name, found in vars(again).items() if name.startswith("_")} == made
    assert made["_slots"] and (made["_chains"] or made["_heads"] or made["_rings"])


def plans_asked_for(family: str, axes: dict[str, int]) -> list[int]:
    """How many plans a row has before and after a step."""
    mesh = Mesh(**axes)
    model = sb.parallelize(tiny_model(family), mesh)
    batch = sb.pack(random_samples([15, 3, 14, 1], 97), model.model.config, mesh)
    before = sum(len(found) for name, found in vars(batch.plans).items() if name.startswith("_"))
    forward_backward(model, [batch])
    return [before, sum(len(found) for name, found in vars(batch.plans).items() if name.startswith("_"))]


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
@pytest.mark.parametrize("axes", [{"ring": 2}, {"ulysses": 2}, {"ring": 2, "ulysses": 2}], ids=str)
def test_a_step_makes_no_plan(family: str, axes: dict[str, int]) -> None:
    for before, after in ranks.run(plans_asked_for, sb.mesh.prod(axes.values()), family, axes):
        assert before == after
