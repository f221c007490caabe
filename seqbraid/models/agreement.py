"""What all ranks agree on before a step sends anything: once per optimizer step, in one exchange."""

from __future__ import annotations

import math
import operator
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..comm.consensus import agree, difference, gather_objects
from ..mesh import Mesh
from .batch import BadBatch, PackedBatch

Divisor = float | str
"""What the sum of a step's losses is divided by: a number, `tokens` (those with a label), `samples` (those
that have one), `pairs` (of samples), or the name of one of the step's counts.
"""


class Agreed(NamedTuple):
    """What the ranks know of each other's part in a step."""

    label_tokens: int
    """Of all micro-batches of all data ranks."""
    counts: dict[str, int]
    """Sums of what each data rank counted in its own samples."""
    flag: bool
    """Whether some rank raised its flag."""
    samples: int = 0
    """Those with a label, of all data ranks."""
    weight_sum: float | None = None
    """Of the weights of their labels; None where no sample of the step has weights."""

    def divisor(self, wanted: Divisor | None) -> float:
        """What a sum over the step is divided by: a number, or the name of one."""
        if wanted is None:
            return self.label_tokens if self.weight_sum is None else self.weight_sum
        if not isinstance(wanted, str):
            return wanted
        found = {"tokens": self.label_tokens, "samples": self.samples, "pairs": self.samples / 2}
        number = {**self.counts, **found}.get(wanted)  # counts of a step may have such a name too
        if number is None:
            raise ValueError(
                f"divisor={wanted!r} is not known; use 'tokens', 'samples', 'pairs', a number, or the name "
                f"of one of the step's counts ({', '.join(self.counts) or 'it has none'})"
            )
        return number


def agree_on_step(
    mesh: Mesh,
    error: Exception | None,
    batches: Sequence[PackedBatch],
    alike: Mapping[str, Any],
    counts: Mapping[str, int] | None = None,
    flag: bool = False,
    of_stage: Mapping[str, Any] | None = None,
) -> Agreed:
    """Make sure that all ranks do the same step, before its first exchange.

    Args:
        error: what this rank refuses; every rank raises it.
        batches: this rank's micro-batches.
        alike: what must be the same on every rank, by the name that the user knows.
        counts: numbers of this data rank, the same on all ranks of its sequence group.
        flag: something that one rank has to tell all others, as that it was asked to stop.
        of_stage: what must be the same on every rank of a pipeline stage.
    """
    counts = {} if counts is None else counts
    own, same = [0, 0, 0, 0, 0, 0, 0, *[0] * len(counts)], dict(alike)
    of_stage = {} if of_stage is None else of_stage
    stage_mark = 0 if mesh.pp == 1 else zlib.crc32(repr(of_stage).encode())
    if mesh.pp == 1:
        same |= of_stage
    if error is None:
        labels = sum(batch.label_tokens for batch in batches)
        samples = sum(batch.num_labelled for batch in batches)
        weighted = any(batch.weight_sum is not None for batch in batches)
        weight = sum(b.label_tokens if b.weight_sum is None else b.weight_sum for b in batches)
        own = [
            step_fingerprint(batches),
            stage_mark,
            int(flag),
            int(weighted),
            _as_int(weight),
            labels,
            samples,
        ]
        own += counts.values()
        same |= {"the number of micro-batches": len(batches), "the keys of the step's counts": list(counts)}
    found = agree(mesh.cpu_group, error, own, same)
    for rank, (mark, stage_mark, *_) in enumerate(found):
        first = rank - rank % (mesh.world_size // mesh.pp)
        if stage_mark != found[first][1]:
            of_ranks = gather_objects(mesh.cpu_group, of_stage)
            differ = difference({first: of_ranks[first], rank: of_ranks[rank]})
            raise ValueError(f"ranks {first} and {rank} have the same pipeline stage, but {differ}")
        leader = mesh.leaders[mesh.data_rank_of(rank)]
        if mark != found[leader][0]:
            raise ValueError(
                f"ranks {leader} and {rank} share a row but packed different samples, or packed them with "
                "different settings; give all ranks with the same mesh.data_rank the same samples and "
                "settings"
            )
    labels, samples, *sums = mesh.sum_over_data([row[5:] for row in found])
    weighted = any(row[3] for row in found)
    weight = sum(_as_float(found[leader][4]) for leader in mesh.leaders)
    return Agreed(
        labels,
        dict(zip(counts, sums, strict=True)),
        any(row[2] for row in found),
        samples,
        weight if weighted else None,
    )


def _as_int(number: float) -> int:
    """The bits of a number, which all ranks get as they are."""
    return int.from_bytes(struct.pack("<d", number), "little", signed=True)


def _as_float(bits: int) -> float:
    (number,) = struct.unpack("<d", bits.to_bytes(8, "little", signed=True))
    return float(number)


def step_fingerprint(batches: Sequence[PackedBatch]) -> int:
    """Of all rows of a step and their layouts."""
    if len(batches) == 1:
        return batches[0].fingerprint
    return zlib.crc32(repr([batch.fingerprint for batch in batches]).encode())


def check_batch(batch: Any, mesh: Mesh, mtp_depth: int = 0) -> None:
    """Refuse what is no batch of this rank; a `BadBatch` raises its own reason."""
    if isinstance(batch, BadBatch):
        raise batch.error
    if not isinstance(batch, PackedBatch):
        raise ValueError(
            f"a parallelized model takes the output of seqbraid.pack, not {type(batch).__name__}; for "
            "other calls, the stock model is .model"
        )
    layout = batch.layout
    if (layout.ring, layout.ulysses) != (mesh.ring, mesh.ulysses) or batch.rank != mesh.sequence_rank:
        raise ValueError(
            f"the batch was packed for rank {batch.rank} of ring={layout.ring} × "
            f"ulysses={layout.ulysses}; this is rank {mesh.sequence_rank} of ring={mesh.ring} × "
            f"ulysses={mesh.ulysses}: pass the model's mesh to pack"
        )
    if (batch.plans.tp, batch.plans.tp_rank) != (mesh.tp, mesh.axis_rank("tp")):
        raise ValueError(
            f"the batch was packed for rank {batch.plans.tp_rank} of tp={batch.plans.tp}; this is rank "
            f"{mesh.axis_rank('tp')} of tp={mesh.tp}: pass the model's mesh to pack"
        )
    if batch.mtp_depth != mtp_depth:
        raise ValueError(
            f"the batch was packed with mtp_depth={batch.mtp_depth}, but the model predicts {mtp_depth} "
            f"tokens beyond the next: pass mtp_depth={mtp_depth} to pack, or mtp=MtpOptions(depth=…) to "
            "parallelize"
        )


NUMBERS = {
    "label_tokens": (0, "the number of label tokens of the whole optimizer step, over all data ranks"),
    "seed": (-(2**63), "the seed of the optimizer step, the same on all ranks"),
}
"""Numbers that a user gives for a step: the smallest that can be meant, and what they are."""


def whole_numbers(**numbers: Any) -> dict[str, int | None]:
    """Seeds and counts as plain integers, whatever they came as; refused where one is no whole number."""
    found: dict[str, int | None] = {}
    for name, value in numbers.items():
        if value is None:
            found[name] = None
            continue
        smallest, what = NUMBERS[name]
        try:
            number = operator.index(value)
        except TypeError:
            raise ValueError(f"{name}={value!r} is not a whole number; give {what}") from None
        if not smallest <= number < 2**63:
            raise ValueError(f"{name}={number} is not between {smallest} and {2**63 - 1}; give {what}")
        found[name] = number
    return found


def check_divisor(divisor: Any) -> Divisor | None:
    """A divisor that a user gives, as a plain number above 0 or a name."""
    if divisor is None or isinstance(divisor, str):
        return divisor
    number: float
    try:
        number = operator.index(divisor)
    except TypeError:
        number = float(divisor) if isinstance(divisor, float) else math.nan
    if not 0 < number < math.inf:
        raise ValueError(
            f"divisor={divisor!r} is not a number above 0; give the number that the sum of the losses of the "
            "whole optimizer step is divided by, or 'tokens', 'samples' or 'pairs'"
        )
    return number


def check_not_cut(mesh: Mesh, what: str) -> None:
    """Refuse what needs the last pipeline stage's hidden states on every rank."""
    if mesh.pp > 1:
        raise ValueError(f"{what} is not supported with pp={mesh.pp} pipeline stages; use pp=1")


def check_temperature(temperature: Any) -> float:
    """What logits are divided by, as a plain number above 0."""
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        raise ValueError(
            f"temperature={temperature!r} is not a number above 0; 1.0 leaves the logits as they are"
        )
    return float(temperature)


def check_no_autocast() -> None:
    """Refuse `torch.autocast`, which casts where the step chooses types itself."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise ValueError(
                f"torch.autocast({device!r}) is on, which changes dtypes inside of kernels; leave it out, "
                "and pass compute_dtype=torch.bfloat16 to parallelize"
            )


OF_NO_STEP = ("architectures", "dtype", "transformers_version", "use_cache")
"""What configs say beside how a model computes in training."""


def config_values(config: Any) -> dict[str, str]:
    """The values of a config that ranks must have in common, in words; where it was read from is not one."""
    return {
        key: _in_words(value)
        for key, value in vars(config).items()
        if not key.startswith("_") and key not in OF_NO_STEP
    }


def _in_words(value: Any) -> str:
    """The same text in every process: a set's own order follows from a seed that each draws for itself."""
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(repr, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key!r}: {_in_words(inner)}' for key, inner in value.items())}}}"
    return repr(value)
