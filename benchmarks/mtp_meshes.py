"""The loss of multi-token prediction on one process and on every mesh of four: it is the same number.

`torchrun --nproc-per-node 4 benchmarks/mtp_meshes.py` prints a line per mesh, of a tiny Qwen3.5 with two
depths on samples of one token and more: the loss of both depths, the norm of the gradient of the module, and
how often each depth's token is the one that the decoder itself finds best.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import seqbraid as sb
from seqbraid.comm.rendezvous import join_on_cpu
from seqbraid.distributed.gradients import gradient_norm
from seqbraid.mesh import launched
from seqbraid.models.step import forward_backward
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.mtp import with_mtp
from seqbraid.models.tiny.samples import random_samples

AXES = ("ring", "ulysses", "tp", "pp")


LENGTHS = (70, 13, 1, 2, 5, 40, 1, 22)


def figures(mesh: sb.Mesh, lengths: Sequence[int] = LENGTHS) -> tuple[float, float, list[float]]:
    """What a step gives on a mesh: the loss, the norm, and the share of each depth that is accepted."""
    model = with_mtp(tiny_model("qwen3_5", linear_num_key_heads=4), depth=2)
    samples = random_samples(lengths, 97, seed=3, ignored="some")
    braided = sb.parallelize(model, mesh)
    batch = sb.pack(
        samples, model.config, mesh, policy="zigzag" if mesh.ring > 1 else "balanced", mtp_depth=2
    )
    out = forward_backward(braided, [batch])
    own = [p.grad for name, p in model.named_parameters() if name.startswith("mtp.") and p.grad is not None]
    norm = gradient_norm(own, mesh)
    braided.release()
    assert out.mtp is not None and out.mtp_loss is not None
    return float(out.mtp_loss), norm, (out.mtp.accepted_tokens_K / out.mtp.label_tokens_K).tolist()


def line(name: str, mesh: sb.Mesh, lengths: Sequence[int]) -> str:
    """The same as a line of the table."""
    loss, norm, accepted = figures(mesh, lengths)
    return f"{name:>12}  {loss:.6f}  {norm:.6f}  {' '.join(f'{share:6.1%}' for share in accepted)}"


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    arguments = parser.parse_args()
    rank, world_size = launched()
    found = [line("one process", sb.Mesh(rank=0, world_size=1), arguments.lengths)] if rank == 0 else []
    if world_size > 1:
        join_on_cpu("mtp_meshes")
        for axis in AXES:
            text = line(f"{axis} = {world_size}", sb.Mesh(**{axis: world_size}), arguments.lengths)
            found.append(text)
    if rank == 0:
        print(f"{'':>12}  {'MTP loss':>8}  {'gradient':>8}  accepted at depth 1, 2")
        print("\n".join(found))


if __name__ == "__main__":
    main()
