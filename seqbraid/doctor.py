"""`seqbraid doctor`: what this machine has, which kernels are used on it, and why not the others."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, metadata, version
from typing import Any

import torch
from packaging.requirements import Requirement
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from .ops.conv import ConvNeed
from .ops.flash_impl import AttentionNeed
from .ops.gated_delta import RuleNeed
from .ops.grouped_linear import GroupedNeed
from .ops.table import TABLE
from .ops.triton_status import RowsNeed

PACKAGES = {
    "torch": "",
    "transformers": "",
    "triton": "our kernels and flash-linear-attention's, on a GPU",
    "fla-core": "gated delta layers on a GPU: pip install 'seqbraid[cuda]'",
    "flash-qla": "gated delta layers on Hopper: pip install 'seqbraid[qla]'",
    "flash-attn-4": "attention on Hopper and Blackwell: pip install 'seqbraid[flash]'",
    "peft": "LoRA: pip install 'seqbraid[lora]'",
    "trl": "the SFTTrainer on a mesh: pip install 'seqbraid[trl]'",
    "datasets": "parquet and Hub data sets: pip install 'seqbraid[datasets]'",
    "zstandard": "files that end in .zst, where pyarrow is missing: pip install 'seqbraid[zstd]'",
    "jsonargparse": "seqbraid train: pip install 'seqbraid[train]'",
    "pillow": "images: pip install 'seqbraid[train]'",
    "tensorboard": "curves of a run: pip install 'seqbraid[train]'",
    "av": "videos: pip install 'seqbraid[video]'",
    "soundfile": "audio: pip install 'seqbraid[audio]'",
}
"""What is worth knowing about, and what it is for."""

FEW_FILES = 4096
"""Open files below which many ranks with loader workers may run out."""
LITTLE_SHARED = 2**30
"""Bytes of shared memory below which NCCL may run out between several GPUs; containers often have 64 MiB."""


@dataclass(frozen=True)
class Package:
    """An installed or missing package."""

    name: str
    version: str | None
    note: str


@dataclass(frozen=True)
class Kernel:
    """A candidate of the table of kernels on a device."""

    op: str
    device: str
    dtype: str
    name: str
    used: bool
    reason: str | None
    """Why it is not used; None if it is, or if one before it is."""


@dataclass(frozen=True)
class Report:
    """What was found."""

    packages: list[Package]
    machine: dict[str, str]
    kernels: list[Kernel]
    advice: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`."""
        return asdict(self)

    def as_text(self) -> RenderableType:
        """For a terminal."""
        machine = Table("machine", "", box=None, title_justify="left", pad_edge=False)
        for key, value in self.machine.items():
            machine.add_row(key, escape(value))
        packages = Table("package", "version", "", box=None, pad_edge=False)
        for package in self.packages:
            packages.add_row(package.name, package.version or "–", escape(package.note))
        kernels = Table("op", "numbers", "kernel", "", box=None, pad_edge=False)
        for k in self.kernels:
            what = "used" if k.used else k.reason or "the one before it is used"
            kernels.add_row(k.op, f"{k.dtype} on {k.device}", k.name, escape(what))
        return Group(machine, "", packages, "", kernels, "", *(f"! {escape(line)}" for line in self.advice))


def examine() -> Report:
    """Look at this machine; packages of kernels are compared with plain maths, as in a first step."""
    packages, advice = _packages()
    machine = _machine()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    advice += _limits(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _shared_memory(), gpus)
    kernels = [kernel for device, dtype in _devices() for kernel in _kernels(device, dtype)]
    return Report(packages, machine, kernels, advice)


def _limits(files: int, shared: int | None, gpus: int) -> list[str]:
    """What to raise before a run."""
    advice = []
    if files < FEW_FILES:
        advice.append(f"only {files} open files are allowed: raise it with `ulimit -n {2 * FEW_FILES}`")
    if gpus > 1 and shared is not None and shared < LITTLE_SHARED:
        advice.append(
            f"only {_gib(shared)} of shared memory are free, which NCCL uses between GPUs: give a container "
            "more with `docker run --ipc=host` or `--shm-size=8g`"
        )
    return advice


def _shared_memory() -> int | None:
    """Free bytes of it."""
    return shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None


def _packages() -> tuple[list[Package], list[str]]:
    found, advice, window = [], [], _window()
    for name, note in PACKAGES.items():
        try:
            installed = version(name)
        except PackageNotFoundError:
            found.append(Package(name, None, note and f"for {note}"))
            continue
        wanted = window.get(name)
        if wanted is not None and not wanted.specifier.contains(installed, prereleases=True):
            note = f"outside of the tested versions ({wanted.specifier})"
            advice.append(f"{name} {installed} is {note}: pip install '{name}{wanted.specifier}'")
            found.append(Package(name, installed, note))
        else:
            found.append(Package(name, installed, "" if wanted is None else f"takes {wanted.specifier}"))
    return found, advice


def _window() -> dict[str, Requirement]:
    """What releases of other packages this one asks for, with its extras."""
    try:
        about = metadata("seqbraid")
    except PackageNotFoundError:  # run from its folder
        return {}
    extras = ["", *(about.get_all("Provides-Extra") or ())]
    parsed = [Requirement(line) for line in about.get_all("Requires-Dist") or ()]
    return {
        r.name: r
        for r in parsed
        if r.marker is None or any(r.marker.evaluate({"extra": extra}) for extra in extras)
    }


def _machine() -> dict[str, str]:
    found = {
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "CPU": f"{os.cpu_count()} cores, {_gib(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}",
        "disk here": f"{_gib(shutil.disk_usage('.').free)} free",
        "open files": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }
    if (shared := _shared_memory()) is not None:
        found["shared memory"] = f"{_gib(shared)} free"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found["GPUs"] = str(count) if count else "none: everything runs on the CPU"
    for i in range(count):
        p = torch.cuda.get_device_properties(i)
        found[f"GPU {i}"] = f"{p.name}, {_gib(p.total_memory)}, compute capability {p.major}.{p.minor}"
    if count:
        found["CUDA"] = str(torch.version.cuda)
    if count and torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if count > 1:
        pairs = [(i, j) for i in range(count) for j in range(count) if i != j]
        direct = sum(torch.cuda.can_device_access_peer(i, j) for i, j in pairs)
        found["interconnect"] = f"{direct} of {len(pairs)} pairs of GPUs have peer access"
    return found


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def _devices() -> list[tuple[torch.device, torch.dtype]]:
    """What models run on here: 16-bit numbers and float32."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    return [(device, torch.bfloat16), (device, torch.float32)]


def _kernels(device: torch.device, dtype: torch.dtype) -> list[Kernel]:
    rows = RowsNeed(device, dtype)
    needs: dict[str, Hashable] = {
        "attention": AttentionNeed(device, dtype, 4, 128, False),
        "gated_delta": RuleNeed(device, dtype, 128, 128),
        "convolution": ConvNeed(device, dtype, 4),
    } | dict.fromkeys(("merge", "loss", "norm", "rotary", "swiglu"), rows)
    needs["experts"] = GroupedNeed(device, dtype, 2048, 768)
    found = []
    for op in TABLE:
        is_chosen = False
        for candidate in op.candidates:
            reason = candidate.why_not(needs[op.name])
            used = reason is None and not is_chosen
            is_chosen |= used
            found.append(
                Kernel(op.name, str(device), str(dtype).removeprefix("torch."), candidate.name, used, reason)
            )
    return found
