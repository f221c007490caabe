"""Compile our Triton kernels for some GPUs, which needs none: `python -m tests.kernels.compiled` prints the
shared memory of each. Not in the interpreter, which takes the compiler's place.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from seqbraid.ops import cross_entropy_triton, gated_delta_triton, merge_triton, rows_triton, swiglu_triton

CAPABILITIES = (80, 90, 100)

SUM = {"first": "i32", "n": "i32"}
STATES = {"start_ptr": "*i64", "stop_ptr": "*i64", "out_ptr": "*fp32"}
HEADS = {"G": 16, "H": 32, "K": 128, "V": 128, "CHUNK": gated_delta_triton.CHUNK, "KEYS": 128}


def kernels() -> list[tuple[Any, dict[str, str], dict[str, Any], tuple[int, int]]]:
    """Kernel, types of its arguments, its constants, and warps and stages, as in a model of usual sizes."""
    found = []
    for total, into, indexed in (("bf16", "fp32", False), ("fp32", "bf16", True), ("fp16", "fp16", False)):
        part = into if total == "fp32" else total
        sizes = {"D": 128, "BLOCK_D": 128, "BLOCK_N": merge_triton.BLOCK_N, "INDEXED": indexed}
        pointers = {"index": "*i64", "part": f"*{part}", "into": f"*{into}"} | SUM | {"num_heads": "i32"}
        lses = {"lse": "*fp32", "part_lse": "*fp32", "num_tokens": "i32"}
        found.append((merge_triton._merge_kernel, {"out": f"*{total}"} | pointers | lses, sizes, (4, 3)))
        found.append((merge_triton._add_kernel, {"total": f"*{total}"} | pointers, sizes, (4, 3)))
        lse_sizes = {"BLOCK_N": merge_triton.LSE_BLOCK_N, "INDEXED": indexed}
        found.append((merge_triton._lse_kernel, {"index": "*i64"} | SUM | lses, lse_sizes, (4, 3)))
    for kernel, names, (columns, *options) in (
        (gated_delta_triton._summary_kernel, ("k", "w", "u", "g"), gated_delta_triton.SUMMARY),
        (
            gated_delta_triton._entering_gradient_kernel,
            ("q", "k", "w", "g", "do", "du", "scale"),
            gated_delta_triton.ENTERING,
        ),
    ):
        types = {f"{name}_ptr": "*fp32" if name == "g" else "*bf16" for name in names if name != "scale"}
        types |= STATES | ({"scale": "fp32"} if "scale" in names else {})
        found.append((kernel, types, HEADS | {"COLUMNS": columns}, tuple(options)))
    rows = {"targets": "*i64", "losses": "*fp32", "bests": "*i64", "num_columns": "i32", "stride": "i64"}
    for dtype in ("bf16", "fp32"):
        types = rows | {"logits": f"*{dtype}", "picked": f"*{dtype}"}
        sizes = {"BLOCK": cross_entropy_triton.BLOCK, "GRADIENT": True}
        found.append((cross_entropy_triton._rows_kernel, types, sizes, (cross_entropy_triton.WARPS, 3)))
        types |= {"tops": "*fp32", "totals": "*fp32", "bests": "*i64"}
        for kernel in (cross_entropy_triton._part_kernel, cross_entropy_triton._part_gradient_kernel):
            found.append((kernel, types, {"BLOCK": sizes["BLOCK"]}, (cross_entropy_triton.WARPS, 3)))
    return found + around_the_mixers()


def around_the_mixers() -> list[tuple[Any, dict[str, str], dict[str, Any], tuple[int, int]]]:
    """Norms of hidden states up to the widest, of heads with rotation, and gated; and gates of MLPs."""
    found, strides = [], ("stride_token", "stride_head", "gate_stride_token", "gate_stride_head")
    for heads, width, turned, centre, gate, dtype in (
        (1, 2560, 0, 0.0, False, "bf16"), (1, 16384, 0, 1.0, False, "fp32"),
        (32, 128, 128, 0.0, False, "bf16"), (16, 256, 64, 1.0, False, "bf16"),
        (1, 128, 0, 0.0, True, "bf16"), (8, 96, 96, None, False, "fp32"),
    ):  # fmt: skip
        sizes = rows_triton.sizes_of(heads, width, turned, centre, gate)
        options = (sizes.pop("num_warps"), 3)
        types = dict.fromkeys(("x", "weight", "gate", "cos", "sin"), f"*{dtype}") | dict.fromkeys(
            strides, "i32"
        )
        types |= {"num_rows": "i32", "eps": "fp32"}
        found.append((rows_triton._rows_forward_kernel, types | {"y": f"*{dtype}"}, sizes, options))
        types |= dict.fromkeys(("dy", "dx", "dgate"), f"*{dtype}") | {"dweight": "*fp32", "num_tiles": "i32"}
        types |= {"dy_stride_token": "i32", "dy_stride_head": "i32"}
        found.append((rows_triton._rows_backward_kernel, types, sizes, options))
    sizes = {"I": 12288, "BLOCK": swiglu_triton.BLOCK}
    strides = dict.fromkeys(("gate_stride", "up_stride", "dgate_stride", "dup_stride"), "i32")
    for dtype in ("bf16", "fp32"):
        types = dict.fromkeys(("gate", "up", "out", "dout", "dgate", "dup"), f"*{dtype}") | strides
        found += [
            (kernel, types, sizes, (4, 3))
            for kernel in (swiglu_triton._swiglu_forward_kernel, swiglu_triton._swiglu_backward_kernel)
        ]
    return found


def main() -> None:
    """One line per kernel and GPU."""
    for kernel, types, constants, (warps, stages) in kernels():
        given = types | dict.fromkeys(constants, "constexpr")
        signature = {name: given[name] for name in kernel.arg_names}
        # As torch's allocator places tensors; without it loads are narrow and nothing is pipelined.
        aligned = {
            (i,): [["tt.divisibility", 16]] for i, kind in enumerate(signature.values()) if kind[0] == "*"
        }
        for capability in CAPABILITIES:
            made = triton.compile(
                ASTSource(kernel, signature, constants, aligned),
                target=GPUTarget("cuda", capability, 32),
                options={"num_warps": warps, "num_stages": stages},
            )
            assert "cubin" in made.asm
            print(kernel.__name__, capability, made.metadata.shared, flush=True)


if __name__ == "__main__":
    main()
