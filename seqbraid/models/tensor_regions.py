"""What of a mixer or MLP is a tensor parallel rank's: which matrices are cut, which rows of others it uses.

What the projections of the families are called and how their rows lie is told here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from ..sequence_parallel import ulysses
from .head import has_hooks
from .lora import linear_below, lora_of
from .mixers import OUT, GatedDeltaSizes, SoftmaxSizes, gated_delta_sizes, local_heads
from .parts import MLPS, LayerParts, ModelParts, is_norm
from .tensor_parts import Adapted, Chosen, Region, ShardedWeight

QUERIES, KEYS, VALUES = "q_proj", "k_proj", "v_proj"

COUNTS = {
    "num_heads": "num_queries",
    "num_attention_heads": "num_queries",
    "num_key_value_heads": "num_keys",
}
"""What attention modules call their numbers of heads."""


def regions_of(parts: ModelParts, layer: LayerParts, size: int, rank: int) -> Iterator[Region]:
    """The mixer and the MLPs of a layer as a rank has them; `ValueError` where they cannot be shared."""
    for region in _regions(parts, layer, size, rank):
        yield replace(region, adapted=tuple(_adapted(region, size, rank)))


def _regions(parts: ModelParts, layer: LayerParts, size: int, rank: int) -> Iterator[Region]:
    where = f"layer {layer.index} of {type(parts.model).__name__}"
    if layer.mixer is None:
        raise ValueError(f"{where} mixes tokens in a way that tp={size} does not know to share; use tp=1")
    if layer.kind == "gated_delta":
        yield _gated_delta(layer.mixer, where, size, rank)
    else:
        yield _attention(layer, parts.heads(layer), where, size, rank)
    for number, module in enumerate(layer.dense):
        yield _mlp(module, "mlp" if not number else f"mlp {number}", where, size, rank)


def _attention(layer: LayerParts, heads: SoftmaxSizes, where: str, size: int, rank: int) -> Region:
    mixer: Any = layer.mixer
    called = type(mixer).__name__
    _check_divides(heads.num_queries, size, "query heads", where)
    out = next((name for name in OUT if isinstance(getattr(mixer, name, None), nn.Module)), None)
    missing = [n for n in (QUERIES, KEYS, VALUES) if not isinstance(getattr(mixer, n, None), nn.Module)]
    if missing or out is None:
        raise ValueError(
            f"the attention of {where} ({called}) has no {', '.join(missing) or 'o_proj'} of its own (its "
            "projections are fused or go through a latent space), so it cannot be cut by heads; use tp=1, "
            "and ring or ulysses instead"
        )
    queries, keys, values = (_linear(mixer, name, where) for name in (QUERIES, KEYS, VALUES))
    widths = heads.num_keys * heads.key_size, heads.num_keys * heads.value_size
    if queries.out_features % heads.num_queries or (keys.out_features, values.out_features) != widths:
        raise ValueError(
            f"the projections of {where} make {queries.out_features}, {keys.out_features} and "
            f"{values.out_features} channels, which are no {heads.num_queries} query and {heads.num_keys} "
            "key heads; use tp=1"
        )
    cuts = [ShardedWeight(queries, 0), ShardedWeight(_check_bias(_linear(mixer, out, where), size, where), 1)]
    chosen: list[Chosen] = []
    plan = ulysses.SoftmaxHeads(heads.num_queries, heads.num_keys, size)
    used = plan.kv_of_query(rank)
    if heads.num_keys % size == 0:
        cuts += [ShardedWeight(keys, 0), ShardedWeight(values, 0)]
    else:
        mine = plan.kv_heads(rank)
        for linear, width in ((keys, heads.key_size), (values, heads.value_size)):
            rows = (slice(mine.start * width, mine.stop * width),)
            chosen += _rows_of(linear, rows, tuple(used or ()))
    others = [
        _linear(mixer, name, where)
        for name, child in mixer.named_children()
        if name not in (QUERIES, KEYS, VALUES, out)
        and isinstance(linear := linear_below(child), nn.Linear)
        and linear.in_features == queries.in_features
        and linear.out_features % heads.num_queries == 0
    ]  # gates of heads or of their channels
    cuts += [ShardedWeight(other, 0) for other in others]
    if "sinks" in dict(mixer.named_parameters(recurse=False)):
        chosen.append(Chosen(mixer, "sinks", (plan.query_heads(rank),)))
    _check_mixer(mixer, cuts, chosen, (heads.key_size, heads.value_size), f"attention of {where}", size)
    local = local_heads(heads, size, rank)
    counts = {
        name: getattr(local, of) for name, of in COUNTS.items() if isinstance(vars(mixer).get(name), int)
    }
    if "num_key_value_groups" in vars(mixer):
        counts["num_key_value_groups"] = local.num_queries // local.num_keys
    return Region("mixer", mixer, tuple(cuts), tuple(chosen), tuple(counts.items()), bool(others))


def _gated_delta(mixer: Any, where: str, size: int, rank: int) -> Region:
    sizes = gated_delta_sizes(mixer)
    _check_divides(sizes.num_keys, size, "key heads of gated delta", where)
    cuts = [ShardedWeight(_linear(mixer, "out_proj", where), 1)]
    chosen: list[Chosen] = []
    keys = _part(sizes.num_keys, size, rank)
    heads = _part(sizes.num_values, size, rank)
    if hasattr(mixer, "in_proj_qkv"):
        cuts.append(ShardedWeight(_linear(mixer, "in_proj_z", where), 0))
        chosen += _rows_of(_linear(mixer, "in_proj_qkv", where), _sections(sizes, size, rank))
        for name in ("in_proj_b", "in_proj_a"):
            chosen += _rows_of(_linear(mixer, name, where), (heads,))
    else:
        cuts.append(ShardedWeight(_linear(mixer, "in_proj_qkvz", where), 0))
        per_key = 2 * sizes.num_values // sizes.num_keys
        rows = (slice(keys.start * per_key, keys.stop * per_key),)
        chosen += _rows_of(_linear(mixer, "in_proj_ba", where), rows)
    chosen += _rows_of(mixer.conv1d, _sections(sizes, size, rank))
    chosen += [Chosen(mixer, name, (heads,)) for name in ("A_log", "dt_bias")]
    _check_mixer(mixer, cuts, chosen, (sizes.value_size,), f"gated delta of {where}", size)
    return Region("mixer", mixer, tuple(cuts), tuple(chosen))


def _rows_of(layer: nn.Module, rows: tuple[slice, ...], repeated: tuple[int, ...] = ()) -> list[Chosen]:
    """The same rows of weight and bias."""
    return [Chosen(layer, name, rows, repeated) for name, _ in layer.named_parameters()]


def _sections(sizes: GatedDeltaSizes, size: int, rank: int) -> tuple[slice, ...]:
    """A rank's channels of queries, keys and values, which lie behind each other."""
    found, start = [], 0
    for count, width in (
        (sizes.num_keys, sizes.key_size),
        (sizes.num_keys, sizes.key_size),
        (sizes.num_values, sizes.value_size),
    ):
        heads = _part(count, size, rank)
        found.append(slice(start + heads.start * width, start + heads.stop * width))
        start += count * width
    return tuple(found)


def _mlp(module: Any, name: str, where: str, size: int, rank: int) -> Region:
    called = type(module).__name__
    names = next(
        (n for n in MLPS if all(isinstance(getattr(module, part, None), nn.Module) for part in n)), None
    )
    if names is None:
        children = ", ".join(child for child, _ in module.named_children())
        raise ValueError(
            f"the MLP of {where} ({called}, with {children}) has projections that are fused, or that "
            f"tp={size} does not know; use tp=1"
        )
    *into, out = (_linear(module, part, where) for part in names)
    cuts = (*(ShardedWeight(linear, 0) for linear in into), ShardedWeight(out, 1))
    _check_divides(out.in_features, size, "channels of the MLP", where)
    _check_bias(out, size, where)
    for parameter, p in _unknown(module, cuts):
        raise ValueError(
            f"the MLP of {where} ({called}) has {parameter} of shape {tuple(p.shape)} beside its linear "
            f"layers, which tp={size} does not know to share; use tp=1"
        )
    channels = out.in_features
    if names[0] == "gate_up_proj" and into[0].out_features == 2 * channels:  # one behind the other
        own = _part(channels, size, rank)
        rows = own, slice(channels + own.start, channels + own.stop)
        return Region(name, module, cuts[-1:], tuple(_rows_of(into[0], rows)), must_be_seen=True)
    if any(linear.out_features != channels for linear in into):
        raise ValueError(
            f"the MLP of {where} ({called}) makes {into[0].out_features} channels and takes "
            f"{out.in_features}, so tp={size} cannot cut it; use tp=1"
        )
    return Region(name, module, cuts)


def _adapted(region: Region, size: int, rank: int) -> Iterator[Adapted]:
    """LoRA takes and gives what its layer does: the rank's rows of B, or its columns of A."""
    chosen = {id(c.module): c for c in region.chosen if c.name == "weight"}
    dims = {id(cut.module): cut.dim for cut in region.cuts}
    for child in region.module.children():
        if (lora := lora_of(child)) is None:
            continue
        if (rows := chosen.get(id(lora.linear))) is not None:
            yield Adapted(lora, replace(rows, module=lora.b))
        elif dims[id(lora.linear)] == 0:
            own = _part(lora.linear.out_features, size, rank)
            yield Adapted(lora, Chosen(lora.b, "weight", (own,)))
        else:
            yield Adapted(lora, None, _part(lora.linear.in_features, size, rank))


def _check_mixer(
    mixer: Any,
    cuts: Iterable[ShardedWeight],
    chosen: Iterable[Chosen],
    widths: tuple[int, ...],
    what: str,
    size: int,
) -> None:
    """Beside what is shared out there may be norms of a head, which are the same for all heads."""
    alike = {id(p) for norm in mixer.children() if is_norm(norm) for p in norm.parameters()}
    for name, p in _unknown(mixer, cuts, chosen):
        if id(p) not in alike or tuple(p.shape) not in [(width,) for width in widths]:
            raise ValueError(
                f"the {what} ({type(mixer).__name__}) has {name} of shape {tuple(p.shape)}, which "
                f"tp={size} does not know to share among heads; use tp=1"
            )


def _unknown(
    module: nn.Module, cuts: Iterable[ShardedWeight], chosen: Iterable[Chosen] = ()
) -> Iterator[tuple[str, nn.Parameter]]:
    """What there is beside what is shared out, and beside adapters of that."""
    known = {id(p) for cut in cuts for p in cut.module.parameters()}
    known |= {id(c.module._parameters[c.name]) for c in chosen}
    for child in module.children():
        if (lora := lora_of(child)) is not None:
            known |= {id(lora.a.weight), id(lora.b.weight)}
    yield from ((name, p) for name, p in module.named_parameters() if id(p) not in known)


def _linear(module: Any, name: str, where: str) -> nn.Linear:
    """A linear layer, or the one below its LoRA."""
    found = getattr(module, name)
    lora_of(found, f"{name} of {where}")  # or another kind of adapter, which is refused
    found = linear_below(found)
    if not isinstance(found, nn.Linear) or has_hooks(found):
        raise ValueError(
            f"{name} of {where} is a {type(found).__name__} and no plain linear layer, so tp cannot cut it; "
            "use tp=1"
        )
    return found


def _check_bias(out: nn.Linear, size: int, where: str) -> nn.Linear:
    if out.bias is not None:
        _check_divides(
            out.out_features, size, "channels of hidden states (there is a bias of as many)", where
        )
    return out


def _check_divides(count: int, size: int, what: str, where: str) -> None:
    if count % size:
        valid = ", ".join(str(n) for n in range(1, min(count, 64) + 1) if count % n == 0)
        raise ValueError(f"tp={size} does not divide the {count} {what} of {where}; use one of {valid}")


def _part(count: int, size: int, rank: int) -> slice:
    return slice(rank * count // size, (rank + 1) * count // size)
