"""A flash attention package is called by its own names, and looked at before it is believed."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash_utils
import transformers.utils as transformers_utils

from seqbraid.ops import flash_impl
from seqbraid.ops.attention_kernels import DenseShape, VarlenShape
from seqbraid.ops.flash_impl import ATTENTION, TORCH, FlashImpl, names_flash_impl
from seqbraid.ops.kernels import Candidate, KernelOptions, Kernels
from seqbraid.ops.table import make_kernels
from tests.helpers.plain import varlen_backward, varlen_forward

KIND = flash_impl.AttentionNeed(torch.device("cpu"), torch.bfloat16, 2, 64, False)
SCALE = 0.125


def on_any_device(candidate: Candidate | None) -> Any:
    """There is no GPU here; what stands in for a package runs on the CPU."""
    return candidate and replace(candidate, unfit=lambda need: None)


ANYWHERE = replace(
    ATTENTION,
    candidates=tuple(map(on_any_device, ATTENTION.candidates)),
    other=lambda name: on_any_device(ATTENTION.other(name)),
)


def chosen(kind: flash_impl.AttentionNeed = KIND, attention: str = "auto") -> str:
    """What a new model would take."""
    return Kernels(KernelOptions(attention=attention)).choose(ANYWHERE, kind)


def with_its_own_statistics(
    dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, shape: Any, scale: float, *places: Any
) -> Any:
    return varlen_backward(dout, q, k, v, *varlen_forward(q, k, v, shape, scale), shape, scale)


def shape_of(causal: bool, sides: tuple[int | None, int | None], of: dict[str, Any]) -> VarlenShape:
    """The arguments of a package, as ours; it must have got them all."""
    left, right = sides
    assert right in ((None, -1) if left in (None, -1) else (0,))
    window = None if left in (None, -1) else left + 1
    return VarlenShape(
        of["cu_seqlens_q"], of["cu_seqlens_k"], of["max_seqlen_q"], of["max_seqlen_k"], causal, window
    )


def package_4() -> ModuleType:
    """A module with the lower functions of FlashAttention-4, as their signatures were in 4.0.0b36."""
    module = ModuleType("stand_in_for_flash_4")

    def _flash_attn_fwd(
        q: Any, k: Any, v: Any, qv: Any = None, *, softmax_scale: float, causal: bool, return_lse: bool,
        window_size_left: int | None, window_size_right: int | None, out: Any = None, **of: Any,
    ) -> Any:  # fmt: skip
        assert return_lse
        shape = shape_of(causal, (window_size_left, window_size_right), of)
        return *varlen_forward(q, k, v, shape, softmax_scale, out), None, None, None

    def _flash_attn_bwd(
        q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, softmax_scale: float, causal: bool, *,
        window_size_left: int | None, window_size_right: int | None, deterministic: bool,
        dq: Any = None, dk: Any = None, dv: Any = None, **of: Any,
    ) -> Any:  # fmt: skip
        shape = shape_of(causal, (window_size_left, window_size_right), of)
        return tuple(varlen_backward(dout, q, k, v, out, lse, shape, softmax_scale, dq, dk, dv))

    return with_functions(module, _flash_attn_fwd, _flash_attn_bwd)


def package_3() -> ModuleType:
    """A module with the lower functions of FlashAttention-3, which writes gradients into what it is given."""
    module = ModuleType("stand_in_for_flash_3")

    def _flash_attn_forward(
        q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool,
        window_size_left: int, window_size_right: int, **of: Any,
    ) -> Any:  # fmt: skip
        shape = shape_of(causal, (window_size_left, window_size_right), of)
        return *varlen_forward(q, k, v, shape, softmax_scale), torch.empty(0), torch.empty(0)

    def _flash_attn_backward(
        dout: Any, q: Any, k: Any, v: Any, out: Any, softmax_lse: Any, *, dq: Any, dk: Any, dv: Any,
        softmax_scale: float, is_causal: bool, window_size_left: int, window_size_right: int,
        deterministic: bool, **of: Any,
    ) -> Any:  # fmt: skip
        shape = shape_of(is_causal, (window_size_left, window_size_right), of)
        found = varlen_backward(dout, q, k, v, out, softmax_lse, shape, softmax_scale)
        for into, gradient in zip((dq, dk, dv), found, strict=True):
            into.copy_(gradient)
        return softmax_lse

    return with_functions(module, _flash_attn_forward, _flash_attn_backward)


def with_functions(module: ModuleType, *functions: Callable[..., Any]) -> ModuleType:
    for function in functions:
        setattr(module, function.__name__, function)

    def flash_attn_varlen_func() -> None:
        """What transformers takes from a package."""

    flash_attn_varlen_func.__module__ = module.__name__
    module.flash_attn_varlen_func = flash_attn_varlen_func  # type: ignore[attr-defined]
    return module


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, ModuleType], None]]:
    """Let transformers find a package under a name; nothing of it is left behind."""
    packages: dict[str, Any] = {}

    def lazy_import(name: str) -> Any:
        if name not in packages:
            raise ImportError(f"no {name} here")
        return (None, packages[name].flash_attn_varlen_func, None, None, None), (dict, dict)

    def put(name: str, module: ModuleType) -> None:
        packages[name] = module
        monkeypatch.setitem(sys.modules, module.__name__, module)

    def clear() -> None:
        for function in (flash_impl.flaw, flash_impl._loaded):
            function.cache_clear()

    monkeypatch.setattr(flash_utils, "lazy_import_flash_attention", lazy_import)
    for version in (3, 4):
        name = f"flash_attention_{version}"
        available = f"is_flash_attn_{version}_available"
        monkeypatch.setattr(transformers_utils, available, lambda name=name: name in packages)
    clear()
    yield put
    clear()


@pytest.mark.parametrize("kind", [KIND, KIND._replace(windowed=True, ratio=3, size=32)], ids=str)
@pytest.mark.parametrize("block", flash_impl.BLOCKS)
def test_a_right_kernel_passes_and_one_with_its_own_statistics_does_not(
    block: Any, kind: flash_impl.AttentionNeed
) -> None:
    good, bad = (
        FlashImpl("good", varlen_forward, varlen_backward),
        FlashImpl("bad", varlen_forward, with_its_own_statistics),
    )
    assert flash_impl.block_error(good, kind, *block) < flash_impl.TOLERANCE
    assert flash_impl.block_error(bad, kind, *block) > 5 * flash_impl.TOLERANCE


def test_a_kernel_that_aligns_causal_blocks_at_their_starts_is_found() -> None:
    def at_their_starts(shape: VarlenShape) -> DenseShape:
        mask = torch.ones(shape.max_q, shape.max_k, dtype=torch.bool)
        return DenseShape(False, mask.tril() if shape.causal else mask)

    wrong = partial(varlen_forward, sees=at_their_starts)
    errors = [
        flash_impl.block_error(FlashImpl("wrong", wrong, varlen_backward), KIND, *block)
        for block in flash_impl.BLOCKS
    ]
    assert max(errors) > 5 * flash_impl.TOLERANCE


@pytest.mark.parametrize("which", range(3))
def test_a_gradient_that_is_not_a_number_is_found(which: int) -> None:
    def spoilt(*arguments: Any) -> Any:
        gradients = varlen_backward(*arguments)
        gradients[which][1] = torch.nan
        return gradients

    error = flash_impl.block_error(FlashImpl("spoilt", varlen_forward, spoilt), KIND, *flash_impl.BLOCKS[0])
    assert not error <= flash_impl.TOLERANCE


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(
    ("name", "package"), [("flash_attention_4", package_4), ("kernels-community/flash-attn3", package_3)]
)
def test_a_package_is_called_by_its_own_names(name: str, package: Any, windowed: bool, load: Any) -> None:
    load(name, package())
    assert chosen(KIND._replace(windowed=windowed), name) == name
    impl = flash_impl._loaded(name)
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (
        torch.randn(2 * 30, h, 64, dtype=torch.float64, generator=generator) for h in (4, 2, 2, 4)
    )
    cu = torch.arange(3, dtype=torch.int32) * 30
    shape = VarlenShape(cu, cu, 30, 30, True, 7 if windowed else None)
    found, wanted = impl.forward(q, k, v, shape, SCALE), varlen_forward(q, k, v, shape, SCALE)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    gradients = impl.backward(dout, q, k, v, *found, shape, SCALE)
    again = varlen_backward(dout, q, k, v, *wanted, shape, SCALE)
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))
    places = [torch.empty_like(x) for x in (q, k, v)]
    impl.backward(dout, q, k, v, *found, shape, SCALE, *places)
    assert all(torch.equal(a, b) for a, b in zip(places, again, strict=True))
    out = torch.empty_like(q)
    placed, _ = impl.forward(q, k, v, shape, SCALE, out)
    assert torch.equal(placed, wanted[0]) and (placed is out) == (name == "flash_attention_4")


def test_the_newest_installed_package_is_taken(load: Any) -> None:
    assert chosen() == TORCH.name
    load("flash_attention_3", package_3())
    assert chosen() == "flash_attention_3"
    load("flash_attention_4", package_4())
    assert chosen() == "flash_attention_4"


def test_an_installed_package_that_is_wrong_is_left_alone(load: Any) -> None:
    wrong = package_4()
    wrong._flash_attn_bwd = lambda q, k, v, *rest, **of: (q, k, v)  # type: ignore[attr-defined]
    load("flash_attention_4", wrong)
    with pytest.warns(UserWarning, match=r"used for attention: flash_attention_4 is off by .*heads of 64"):
        assert chosen() == TORCH.name
    with pytest.raises(ValueError, match=r"attention='flash_attention_4' cannot be used: .* is off by"):
        chosen(attention="flash_attention_4")


def test_an_installed_package_that_fails_is_left_alone(load: Any) -> None:
    def refuse(*arguments: Any, **of: Any) -> None:
        raise AssertionError("heads of 64 are not supported")

    failing = package_4()
    failing._flash_attn_fwd = refuse  # type: ignore[attr-defined]
    load("flash_attention_4", failing)
    load("flash_attention_3", package_3())
    with pytest.warns(UserWarning, match="does not take torch.bfloat16 heads of 64 .*not supported"):
        assert chosen() == "flash_attention_3"


def test_what_cannot_be_had_is_refused_when_it_is_asked_for(load: Any) -> None:
    def wish(name: str) -> None:
        make_kernels(KernelOptions(attention=name))

    with pytest.raises(
        ValueError,
        match=r"attention='eager' is not a kernel for this op; use one of 'auto', 'flash.*'torch'",
    ):
        wish("eager")
    with pytest.raises(ValueError, match=r"'flash_attention_4' cannot be used: .*not installed; pip install"):
        wish("flash_attention_4")
    load("kernels-community/vllm-flash-attn3", with_functions(ModuleType("stand_in_without_backward")))
    without_varlen = ModuleType("stand_in_without_varlen")
    without_varlen.flash_attn_varlen_func = None  # type: ignore[attr-defined]
    load("somebody/attention", without_varlen)
    for name in ("kernels-community/vllm-flash-attn3", "somebody/attention"):
        with pytest.raises(ValueError, match="no forward that returns an LSE"):
            wish(name)


def test_a_model_loaded_with_flash_attention_wishes_for_it(load: Any) -> None:
    load("flash_attention_3", package_3())
    load("flash_attention_4", package_4())
    assert make_kernels(None, "flash_attention_3").options.attention == "flash_attention_3"
    assert make_kernels(None, "sdpa").options.attention == "auto"
    asked = KernelOptions(attention="torch")
    assert make_kernels(asked, "flash_attention_3").options.attention == "torch"


def test_nothing_of_it_on_the_cpu(load: Any) -> None:
    load("flash_attention_4", package_4())
    q, k = torch.zeros(1, 4, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 64, dtype=torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for wish in ("auto", "flash_attention_4"):
            kernels = make_kernels(KernelOptions(attention=wish))
            assert flash_impl.flash_impl(q, k, False, kernels) is TORCH


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("flash_attention_3", True),
        ("flash_attention_4", True),
        ("kernels-community/flash-attn3", True),
        ("kernels-community/vllm-flash-attn3", True),
        ("kernels-community/flash-attn4", True),
        ("kernels-community/flash-attn2", False),
        ("flash_attention_2", False),
        ("sdpa", False),
        (None, False),
    ],
)
def test_names_of_transformers(name: str | None, is_one: bool) -> None:
    assert names_flash_impl(name) is is_one
