"""What tensor parallel ranks share of a model: which matrices are cut, and which rows of others a rank uses.

A mixer or MLP is given all tokens of the ranks and works with its own heads or channels; between them a rank
has its own tokens. Nothing is computed by two ranks:
- matrices are cut by heads, channels or tokens of the vocabulary (`Cut`);
- what a rank uses some rows of, without the cut being even (key heads for several ranks, rows that lie in
  sections), is whole when it is gathered, as all is that works on a rank's own tokens or heads: norms,
  routers, experts, towers (`Chosen`). The ranks' gradients of those add up to the whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..mesh import Mesh
from ..sequence_parallel import ulysses
from .head import has_hooks, refuse_adapter
from .mixers import GatedDeltaSizes, SoftmaxHeads, gated_delta_sizes, local_heads
from .parts import LayerParts, ModelParts, is_norm
from .tensor_parts import Chosen, Cut, Region
from .tensor_probe import parts_make_the_whole

QUERIES, KEYS, VALUES = "q_proj", "k_proj", "v_proj"
OUT = ("o_proj", "out_proj", "dense")
"""What the families call the projection behind attention whose inputs are heads."""

DENSE = (
    ("gate_proj", "up_proj", "down_proj"),
    ("gate_up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("fc1", "fc2"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("w1", "w3", "w2"),
)
"""What they call the linear layers of an MLP, the last one last."""

COUNTS = {
    "num_heads": "num_queries",
    "num_attention_heads": "num_queries",
    "num_key_value_heads": "num_keys",
}
"""What attention modules call their numbers of heads."""


@dataclass(frozen=True, eq=False)
class TensorPlan:
    """How the matrices of a model are shared; made before anything is changed, alike on all ranks."""

    size: int
    embedding: Cut
    head: Cut
    regions: tuple[tuple[Region, ...], ...]
    """Of each layer."""

    @staticmethod
    def of_mesh(parts: ModelParts, mesh: Mesh) -> TensorPlan:
        """Of this rank."""
        return TensorPlan.of(parts, mesh.tp, mesh.axis_rank("tp"))

    @staticmethod
    def of(parts: ModelParts, size: int, rank: int = 0, is_tried: bool = True) -> TensorPlan:
        """`ValueError` where a model cannot be shared by so many, naming the part and what can.

        Without `is_tried`, names and shapes are all that is looked at: for a model that is shared already.
        """
        model = type(parts.model).__name__
        if hasattr(parts.model, "peft_config") or any(
            hasattr(m, "base_layer") for m in parts.model.modules()
        ):
            raise ValueError(f"{model} has LoRA adapters, which tp={size} does not share yet; use tp=1")
        vocabulary = int(parts.head.weight.shape[0])
        if vocabulary_rows(vocabulary, size, size - 1).start >= vocabulary:
            raise ValueError(
                f"tp={size} is too large for the {vocabulary} tokens of the vocabulary of {model}"
            )
        _check_embedding(parts, size)
        if is_tried:
            _check_parts(parts, size)
        layers = tuple(tuple(_regions(parts, layer, size, rank)) for layer in parts.layers)
        plan = TensorPlan(size, Cut(parts.embedding, 0), Cut(parts.head, 0), layers)
        plan._check_shared(parts)
        return plan

    @property
    def cuts(self) -> Iterator[Cut]:
        """All of them, a tied weight twice."""
        yield self.embedding
        yield self.head
        for layer in self.regions:
            for region in layer:
                yield from region.cuts

    @property
    def cut_parameters(self) -> frozenset[int]:
        """The ids of all parameters that are cut."""
        return frozenset(id(p) for cut in self.cuts for p in cut.module.parameters())

    def _check_shared(self, parts: ModelParts) -> None:
        found: dict[int, nn.Module] = {}
        tied = {id(parts.embedding), id(parts.head)}
        for cut in self.cuts:
            for p in cut.module.parameters():
                other = found.setdefault(id(p), cut.module)
                if other is not cut.module and not {id(other), id(cut.module)} <= tied:
                    raise ValueError(
                        f"layers of {type(parts.model).__name__} share a weight, which tp={self.size} does "
                        "not cut yet; use tp=1"
                    )


def vocabulary_rows(vocabulary: int, size: int, rank: int) -> slice:
    """The tokens of a rank, cut as `torch.chunk` does.

    >>> vocabulary_rows(97, 2, 1)
    slice(49, 97, None)
    """
    widest = -(-vocabulary // size)
    return slice(min(vocabulary, rank * widest), min(vocabulary, (rank + 1) * widest))


def _check_embedding(parts: ModelParts, size: int) -> None:
    name = type(parts.model).__name__
    if not isinstance(parts.embedding, nn.Embedding):
        raise ValueError(
            f"tp={size} cuts the embedding of {name} by tokens, but it is a "
            f"{type(parts.embedding).__name__}; use tp=1"
        )
    if parts.other_embeddings:
        raise ValueError(
            f"{name} has {len(parts.other_embeddings)} embeddings beside that of its tokens, which tp={size} "
            "does not know to share; use tp=1"
        )


def _check_parts(parts: ModelParts, size: int) -> None:
    """One mixer and MLP of each class and size is tried."""
    tried: set[Any] = set()
    for layer in parts.layers:
        of_ranks = zip(*(_regions(parts, layer, size, rank) for rank in range(size)), strict=True)
        for regions in of_ranks:
            region = regions[0]
            shapes = tuple(tuple(cut.module.weight.shape) for cut in region.cuts)
            if layer.kind == "gated_delta" and region.module is layer.mixer:
                continue  # whose forward is ours
            if (key := (type(region.module), shapes)) in tried:
                continue
            tried.add(key)
            is_mixer = region.module is layer.mixer
            found = parts_make_the_whole(regions, parts.heads(layer).key_size if is_mixer else None)
            if found is False or (region.must_be_seen and not found):
                raise ValueError(
                    f"the {'attention' if is_mixer else 'MLP'} of layer {layer.index} of "
                    f"{type(parts.model).__name__} ({type(region.module).__name__}) does not give in {size} "
                    f"parts what it gives whole, so tp={size} cannot share it; use tp=1"
                )


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


def _attention(layer: LayerParts, heads: SoftmaxHeads, where: str, size: int, rank: int) -> Region:
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
    cuts = [Cut(queries, 0), Cut(_check_bias(_linear(mixer, out, where), size, where), 1)]
    chosen: list[Chosen] = []
    plan = ulysses.SoftmaxHeads(heads.num_queries, heads.num_keys, size)
    used = plan.kv_of_query(rank)
    if heads.num_keys % size == 0:
        cuts += [Cut(keys, 0), Cut(values, 0)]
    else:
        mine = plan.kv_heads(rank)
        for linear, width in ((keys, heads.key_size), (values, heads.value_size)):
            rows = (slice(mine.start * width, mine.stop * width),)
            names = [name for name, _ in linear.named_parameters()]
            chosen += [Chosen(linear, name, rows, tuple(used or ())) for name in names]
    others = [
        child
        for name, child in mixer.named_children()
        if name not in (QUERIES, KEYS, VALUES, out)
        and isinstance(child, nn.Linear)
        and child.in_features == queries.in_features
        and child.out_features % heads.num_queries == 0
    ]  # gates of heads or of their channels
    cuts += [Cut(other, 0) for other in others]
    known = {id(p) for cut in cuts for p in cut.module.parameters()}
    known |= {id(p) for linear in (keys, values) for p in linear.parameters()}
    if "sinks" in dict(mixer.named_parameters(recurse=False)):
        chosen.append(Chosen(mixer, "sinks", (plan.query_heads(rank),)))
        known.add(id(mixer.sinks))
    _check_known(mixer, known, (heads.key_size, heads.value_size), f"attention of {where}", size)
    local = local_heads(heads, size, rank)
    counts = {
        name: getattr(local, of) for name, of in COUNTS.items() if isinstance(vars(mixer).get(name), int)
    }
    if "num_key_value_groups" in vars(mixer):
        counts["num_key_value_groups"] = local.num_queries // local.num_keys
    return Region("mixer", mixer, tuple(cuts), tuple(chosen), tuple(counts.items()), bool(others))


def _check_known(mixer: Any, known: set[int], widths: tuple[int, ...], what: str, size: int) -> None:
    """Beside what is shared out there may be norms of a head, which are the same for all heads."""
    for norm in mixer.children():
        if is_norm(norm):
            known |= {id(p) for p in norm.parameters() if p.shape in [(width,) for width in widths]}
    for name, parameter in mixer.named_parameters():
        if id(parameter) not in known:
            raise ValueError(
                f"the {what} ({type(mixer).__name__}) has {name} of shape {tuple(parameter.shape)}, which "
                f"tp={size} does not know to share among heads; use tp=1"
            )


def _gated_delta(mixer: Any, where: str, size: int, rank: int) -> Region:
    sizes = gated_delta_sizes(mixer)
    _check_divides(sizes.num_keys, size, "key heads of gated delta", where)
    cuts = [Cut(_linear(mixer, "out_proj", where), 1)]
    chosen: list[Chosen] = []
    keys = _part(sizes.num_keys, size, rank)
    heads = _part(sizes.num_values, size, rank)
    if hasattr(mixer, "in_proj_qkv"):
        cuts.append(Cut(_linear(mixer, "in_proj_z", where), 0))
        chosen += _rows_of(mixer, "in_proj_qkv", where, _sections(sizes, size, rank))
        chosen += [c for name in ("in_proj_b", "in_proj_a") for c in _rows_of(mixer, name, where, (heads,))]
    else:
        cuts.append(Cut(_linear(mixer, "in_proj_qkvz", where), 0))
        per_key = 2 * sizes.num_values // sizes.num_keys
        chosen += _rows_of(mixer, "in_proj_ba", where, (slice(keys.start * per_key, keys.stop * per_key),))
    for name, _ in mixer.conv1d.named_parameters():
        chosen.append(Chosen(mixer.conv1d, name, _sections(sizes, size, rank)))
    chosen += [Chosen(mixer, name, (heads,)) for name in ("A_log", "dt_bias")]
    known = {id(p) for cut in cuts for p in cut.module.parameters()}
    known |= {id(getattr(c.module, c.name)) for c in chosen}
    _check_known(mixer, known, (sizes.value_size,), f"gated delta of {where}", size)
    return Region("mixer", mixer, tuple(cuts), tuple(chosen))


def _rows_of(mixer: Any, name: str, where: str, rows: tuple[slice, ...]) -> list[Chosen]:
    linear = _linear(mixer, name, where)
    return [Chosen(linear, parameter, rows) for parameter, _ in linear.named_parameters()]


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
        (n for n in DENSE if all(isinstance(getattr(module, part, None), nn.Module) for part in n)), None
    )
    if names is None:
        children = ", ".join(child for child, _ in module.named_children())
        raise ValueError(
            f"the MLP of {where} ({called}, with {children}) has projections that are fused, or that "
            f"tp={size} does not know; use tp=1"
        )
    *into, out = (_linear(module, part, where) for part in names)
    cuts = (*(Cut(linear, 0) for linear in into), Cut(out, 1))
    _check_divides(out.in_features, size, "channels of the MLP", where)
    _check_bias(out, size, where)
    known = {id(p) for cut in cuts for p in cut.module.parameters()}
    for parameter, p in module.named_parameters():
        if id(p) not in known:
            raise ValueError(
                f"the MLP of {where} ({called}) has {parameter} of shape {tuple(p.shape)} beside its linear "
                f"layers, which tp={size} does not know to share; use tp=1"
            )
    channels = out.in_features
    if names[0] == "gate_up_proj" and into[0].out_features == 2 * channels:  # one behind the other
        own = _part(channels, size, rank)
        rows = own, slice(channels + own.start, channels + own.stop)
        chosen = tuple(_rows_of(module, names[0], where, rows))
        return Region(name, module, cuts[-1:], chosen, must_be_seen=True)
    if any(linear.out_features != channels for linear in into):
        raise ValueError(
            f"the MLP of {where} ({called}) makes {into[0].out_features} channels and takes "
            f"{out.in_features}, so tp={size} cannot cut it; use tp=1"
        )
    return Region(name, module, cuts)


def _linear(module: Any, name: str, where: str) -> nn.Linear:
    found = getattr(module, name)
    refuse_adapter(found, f"{name} of {where}")
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
