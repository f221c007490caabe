"""Checkpoints come back bit for bit, on any mesh, after any kill, and nothing is pickled."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor

from seqbraid import BraidedModel, Mesh, pack, parallelize
from seqbraid.models.tiny.decoders import tiny_model
from seqbraid.models.tiny.samples import random_samples
from seqbraid.train.checkpoint import files
from seqbraid.train.checkpoint.checkpoints import CheckpointError, Checkpoints, Failed, Published
from tests.helpers import ranks

STATE = {"schedule": {"step": 2}, "loader": {"buffer": [[3, 17], [4, 9]], "epoch": 1}, "best": None}


class MasterAdam(torch.optim.Optimizer):
    """bf16 parameters beside float32 master weights, with a step that is a plain number."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["master"] = p.detach().float()
                    state["exp_avg"] = torch.zeros_like(p, dtype=torch.float32)
                state["step"] += 1
                state["exp_avg"].lerp_(p.grad.float(), 0.1)
                state["master"].sub_(group["lr"] * state["exp_avg"])
                p.copy_(state["master"])


def build(mesh: Mesh, family: str, seed: int, **changes: Any) -> tuple[BraidedModel, torch.optim.Optimizer]:
    """A model with a frozen parameter and its optimizer; 97 rows of vocabulary, so that shards are uneven."""
    dtype = changes.pop("dtype", torch.float32)
    model = parallelize(tiny_model(family, seed=seed, dtype=dtype, **changes), mesh)
    next(p for name, p in model.named_parameters() if "layers.1" in name).requires_grad_(False)
    if dtype == torch.bfloat16:
        return model, MasterAdam(model.parameters(), lr=1e-2)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(mesh: Mesh, model: BraidedModel, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        samples = random_samples([9, 40, 5], 97, seed=step + 10 * mesh.data_rank, ignored="none")
        model(pack(samples, model.model.config, mesh)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def whole(model: BraidedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every number of model and optimizer, gathered and cloned, without the code under test."""

    def full(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()

    found = {name: full(tensor) for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for entry, value in optimizer.state.get(parameter, {}).items():
            found[f"{name}:{entry}"] = full(value)
    return found


def differences(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    def same(x: Any, y: Any) -> bool:
        if isinstance(x, Tensor) and isinstance(y, Tensor):
            return x.dtype == y.dtype and x.shape == y.shape and bool((x == y).all())
        return type(x) is type(y) and x == y

    return sorted(a.keys() ^ b.keys()) + [name for name in a.keys() & b.keys() if not same(a[name], b[name])]


def prepare(folder: Path, steps: int = 2, **options: Any) -> tuple[Any, ...]:
    mesh = Mesh()
    model, optimizer = build(mesh, "llama", 0)
    train(mesh, model, optimizer, steps)
    return Checkpoints(folder, mesh, **options), model, optimizer


@pytest.mark.parametrize(
    ("family", "changes"),
    [("llama", {}), ("qwen3_5", {}), ("llama", {"dtype": torch.bfloat16, "tie_word_embeddings": True})],
)
def test_round_trip_is_bit_for_bit_and_unpickles_nothing(
    tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    mesh = Mesh()
    model, optimizer = build(mesh, family, 0, **changes)
    train(mesh, model, optimizer)
    saved = whole(model, optimizer)
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints", mesh)
    rng = torch.get_rng_state()
    with no_pickle():
        checkpoints.save(2, model, optimizer, STATE, {"rng": rng})
        with torch.no_grad():  # the copy was taken: what training does now must not show
            for tensor in [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]:
                if isinstance(tensor, Tensor):
                    tensor.fill_(7)
        (event,) = checkpoints.finish()
        assert isinstance(event, Published) and event.step == 2
        other, fresh = build(mesh, family, 1, **changes)
        assert checkpoints.last() == event.path
        assert checkpoints.load(event.path, other, fresh) == STATE
        assert torch.equal(checkpoints.rank_tensors(event.path)["rng"], rng)
    assert differences(saved, whole(other, fresh)) == []
    assert [p.dtype for p in other.parameters()] == [p.dtype for p in model.parameters()]
    train(mesh, other, fresh)  # the restored optimizer is one that can step
    for path in event.path.iterdir():
        # A pickle starts with the opcode PROTO (0x80), a zip of torch.save with "PK".
        assert path.suffix in (".json", ".safetensors") and path.read_bytes()[:1] not in (b"\x80", b"P")
    with safe_open(event.path / "rank-00000.safetensors", framework="pt") as tensors:
        keys = set(tensors.keys())
    assert ("model.model.lm_head.weight" in keys) != changes.get("tie_word_embeddings", False)


@contextmanager
def no_pickle() -> Iterator[None]:
    """Nothing is pickled or unpickled inside, neither to a file nor on the way between ranks."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("something was pickled or unpickled")

    with ExitStack() as stack:
        for name in ("load", "loads", "dump", "dumps", "Unpickler", "Pickler"):
            stack.enter_context(mock.patch.object(pickle, name, refuse))
        for name in ("_pickler", "_unpickler"):
            stack.enter_context(mock.patch.object(distributed_c10d, name, refuse))
        for name in ("save", "load"):
            stack.enter_context(mock.patch.object(torch, name, refuse))
        yield


def test_saving_a_fresh_optimizer_leaves_it_fresh(tmp_path: Path) -> None:
    checkpoints, model, optimizer = prepare(tmp_path, steps=0, asynchronous=False)
    checkpoints.save(0, model, optimizer, {})
    assert not optimizer.state
    other, trained = build(Mesh(), "llama", 1)
    train(Mesh(), other, trained)
    checkpoints.load(checkpoints.last(), other, trained)
    assert not trained.state and differences(whole(model, optimizer), whole(other, trained)) == []


# Meshes.

TWO_HEADS = {"linear_num_value_heads": 2, "linear_num_key_heads": 1}
"""Some parameters have two rows then, which do not reach all of four ranks."""


def save_on(folder: str, sizes: dict[str, int], family: str, changes: dict[str, Any]) -> dict[str, Any]:
    mesh = Mesh(**sizes)
    model, optimizer = build(mesh, family, 0, **changes)
    train(mesh, model, optimizer)
    with torch.no_grad():
        model(
            pack(random_samples([8], 97), model.model.config, mesh)
        )  # leaves the root's parameters gathered
    save(Checkpoints(Path(folder), mesh), model, optimizer)
    return whole(model, optimizer)


def save(checkpoints: Checkpoints, model: BraidedModel, optimizer: torch.optim.Optimizer) -> None:
    with no_pickle():
        checkpoints.save(2, model, optimizer, STATE, {"own": torch.full((3,), checkpoints.mesh.rank)})
        events: list[Any] = []
        while not events:
            events = checkpoints.poll()
    assert [type(event) for event in events] == [Published]


def load_on(
    folder: str, sizes: dict[str, int], family: str, changes: dict[str, Any], again: str | None
) -> dict[str, Any]:
    """Load, and save again from this mesh if there is a folder for that."""
    mesh = Mesh(**sizes)
    model, optimizer = build(mesh, family, 1, **changes)
    checkpoints = Checkpoints(Path(folder), mesh)
    path = checkpoints.last()
    assert path is not None
    with no_pickle():
        assert checkpoints.load(path, model, optimizer) == STATE
        assert checkpoints.rank_tensors(path) == {}
    if again is not None:
        second = Checkpoints(Path(again), mesh)
        save(second, model, optimizer)
        assert second.rank_tensors(Path(again) / path.name)["own"].tolist() == [mesh.rank] * 3
        held = [p.to_local().numel() for p in model.parameters() if isinstance(p, DTensor)]
        assert (0 in held) == (mesh.rank >= 2)
    return whole(model, optimizer)


def test_what_one_mesh_saves_another_loads_and_saves_again(tmp_path: Path) -> None:
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    case = ("qwen3_5", TWO_HEADS)
    saved, *_ = ranks.run(save_on, 2, first, {"ring": 2}, *case)
    for found in ranks.run(load_on, 4, first, {"dp_shard": 2, "ulysses": 2}, *case, second):
        assert differences(saved, found) == []
    for folder in (first, second):
        assert differences(saved, load_on(folder, {}, *case, None)) == []


def test_copies_of_a_replicated_model_are_written_once_and_by_all_ranks(tmp_path: Path) -> None:
    case = ("llama", {"dtype": torch.bfloat16})
    saved, *_ = ranks.run(save_on, 4, str(tmp_path), {"dp_replicate": 2, "ring": 2}, *case)
    assert differences(saved, load_on(str(tmp_path), {}, *case, None)) == []
    index = json.loads((tmp_path / "step-00000002" / "index.json").read_text())
    parts = [sizes for entry in index.values() for _, _, sizes in entry["chunks"]]
    whole_size = sum(torch.Size(entry["shape"]).numel() for entry in index.values())
    assert sum(torch.Size(sizes).numel() for sizes in parts) == whole_size
    on_disk = [path.stat().st_size for path in (tmp_path / "step-00000002").glob("rank-*.safetensors")]
    assert len(on_disk) == 4 and max(on_disk) < 2 * min(on_disk)


# What does not fit is refused, with its name.


def test_a_damaged_checkpoint_is_refused_with_the_name_of_the_file(tmp_path: Path) -> None:
    checkpoints, model, optimizer = prepare(tmp_path, asynchronous=False)
    checkpoints.save(2, model, optimizer, STATE)
    path = checkpoints.last()
    before = whole(model, optimizer)
    for name in sorted(os.listdir(path)):
        original = (path / name).read_bytes()
        damaged = bytearray(original)
        damaged[len(damaged) // 2] ^= 1
        (path / name).write_bytes(damaged)
        with pytest.raises(ValueError, match=name):
            checkpoints.load(path, model, optimizer)
        (path / name).write_bytes(original[:-1])
        with pytest.raises(ValueError, match=name):
            checkpoints.load(path, model, optimizer)
        with pytest.raises(ValueError, match=name):
            checkpoints.last()
        (path / name).unlink()
        with pytest.raises(ValueError, match=name):
            checkpoints.load(path, model, optimizer)
        (path / name).write_bytes(original)
    manifest = (path / files.MANIFEST).read_bytes()
    for place in range(len(manifest)):  # a digit that turns into another is still JSON
        damaged = bytearray(manifest)
        damaged[place] ^= 1
        (path / files.MANIFEST).write_bytes(damaged)
        with pytest.raises(ValueError, match=r"complete\.json is damaged"):
            files.read_manifest(path)
    (path / files.MANIFEST).write_bytes(manifest)
    assert differences(before, whole(model, optimizer)) == []
    checkpoints.load(path, model, optimizer)


def test_a_model_or_optimizer_that_does_not_fit_is_refused_untouched(tmp_path: Path) -> None:
    checkpoints, model, optimizer = prepare(tmp_path, asynchronous=False)
    checkpoints.save(2, model, optimizer, STATE)
    path = checkpoints.last()
    cases = [
        ({"num_hidden_layers": 3}, "lacks model.model.model.layers.2"),
        ({"intermediate_size": 64}, r"model.model.model.layers.0.mlp.gate_proj.weight has shape \[64, 32\]"),
        ({"attention_bias": True}, "lacks model.model.model.layers.0.self_attn.k_proj.bias"),
        ({"tie_word_embeddings": True}, "has model.model.lm_head.weight, unknown"),
        ({"dtype": torch.bfloat16}, "embed_tokens.weight is torch.bfloat16, in the checkpoint torch.float32"),
    ]
    for changes, message in cases:
        dtype = changes.get("dtype", torch.float32)
        other = parallelize(
            tiny_model("llama", 1, dtype, **{k: v for k, v in changes.items() if k != "dtype"})
        )
        with pytest.raises(ValueError, match=message):
            checkpoints.load(path, other, None)
    other, fresh = build(Mesh(), "llama", 1)
    frozen = dict(other.named_parameters())["model.lm_head.weight"]
    before = whole(other, fresh)
    frozen.requires_grad_(False)
    with pytest.raises(ValueError, match=r"does not train model.lm_head.weight; the one that was saved did"):
        checkpoints.load(path, other, fresh)
    assert differences(before, whole(other, fresh)) == []
    with pytest.raises(ValueError, match="not the model's"):
        checkpoints.load(path, other, optimizer)
    checkpoints.save(3, model, None, {})
    with pytest.raises(ValueError, match="has no optimizer state"):
        checkpoints.load(tmp_path / "step-00000003", model, optimizer)
    with pytest.raises(ValueError, match=r"state.loader has the key 3"):
        checkpoints.save(4, model, optimizer, {"loader": {3: 4}})
    with pytest.raises(ValueError, match=r"state.rng\[0\] is a Tensor"):
        checkpoints.save(4, model, optimizer, {"rng": [torch.zeros(1)]})


def test_frozen_parameters_of_known_weights_are_left_out(tmp_path: Path) -> None:
    checkpoints, model, optimizer = prepare(tmp_path, asynchronous=False, base="these")
    (frozen,) = (name for name, p in model.named_parameters() if not p.requires_grad)
    checkpoints.save(2, model, optimizer, STATE)
    path = tmp_path / "step-00000002"
    saved = json.loads((path / "index.json").read_text())
    trained = {f"model.{name}" for name, p in model.named_parameters() if p.requires_grad}
    assert {key for key in saved if key.startswith("model.")} == trained
    assert f"model.{frozen}" not in saved

    again, fresh = build(Mesh(), "llama", 1)
    own = dict(again.named_parameters())[frozen].detach().clone()
    before = whole(again, fresh)
    for base in (None, "others"):
        with pytest.raises(
            ValueError, match=r"on top of the weights these but the model has (unknown|others)"
        ):
            Checkpoints(tmp_path, Mesh(), base=base).load(path, again, fresh)
    assert differences(before, whole(again, fresh)) == []
    Checkpoints(tmp_path, Mesh(), base="these").load(path, again, fresh)
    assert differences(whole(model, optimizer), whole(again, fresh)) == [frozen]
    assert torch.equal(dict(again.named_parameters())[frozen], own)

    # What was saved whole is loaded whole.
    Checkpoints(tmp_path, Mesh(), asynchronous=False).save(3, model, optimizer, STATE)
    Checkpoints(tmp_path, Mesh(), base="others").load(tmp_path / "step-00000003", again, fresh)
    assert differences(whole(model, optimizer), whole(again, fresh)) == []


# Retention and pointers.


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints, model, _ = prepare(tmp_path, steps=0, keep=2)
    for step in (10, 20, 30, 40, 50):
        checkpoints.save(step, model, None, {"step": step})
        if step == 20:
            checkpoints.mark_best(20)
    checkpoints.finish()
    assert published(tmp_path) == [20, 40, 50] and (tmp_path / "best").read_text() == "step-00000020\n"
    with pytest.raises(ValueError, match="step 10 has no checkpoint"):
        checkpoints.mark_best(10)
    checkpoints.mark_best(50)
    assert files.pointed(tmp_path, "best") == tmp_path / "step-00000050"
    # Set back to an earlier step, the run's new checkpoints are the newest, whatever their numbers.
    checkpoints.load(tmp_path / "step-00000020", model, None)
    checkpoints.save(25, model, None, {"step": 25})
    checkpoints.save(50, model, None, {"step": 50, "again": True})
    checkpoints.finish()
    assert checkpoints.last() == tmp_path / "step-00000050" and published(tmp_path) == [25, 50]
    assert checkpoints.load(tmp_path / "step-00000050", model, None) == {"step": 50, "again": True}
    files.retain(tmp_path, 1, protected=["step-00000025"])  # as one that is being loaded
    assert published(tmp_path) == [25, 50]
    files.retain(tmp_path, 1, protected=[])
    assert published(tmp_path) == [50]
    # Without a pointer the one published last; what a torn one would have named is not guessed.
    for torn in (b"step-000", b"", b"../step-00000050", b"step-00000099", b"\xff"):
        (tmp_path / "last").write_bytes(torn)
        with pytest.raises(ValueError, match="last names"):
            checkpoints.last()
        assert checkpoints.last("latest-intact") == tmp_path / "step-00000050"
    (tmp_path / "last").unlink()
    assert checkpoints.last() == tmp_path / "step-00000050"
    (tmp_path / "mine.tmp").mkdir()
    (tmp_path / "step-00000060.tmp").mkdir()
    assert checkpoints.last() is not None and (tmp_path / "mine.tmp").exists()
    assert not (tmp_path / "step-00000060.tmp").exists()


def published(folder: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in folder.glob("step-????????"))


# A kill at any moment.


def test_a_kill_at_any_system_call_leaves_the_old_or_the_new(tmp_path: Path) -> None:
    script = [sys.executable, "-c", f"from {__name__} import sweep; sweep({str(tmp_path)!r})"]
    done = subprocess.run(script, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    for outcomes in json.loads(done.stdout):
        # Old, old, …, new, new: never back, and both ends are there.
        assert outcomes == sorted(outcomes) and outcomes[0] == "1 old" and outcomes[-1] == "2 new"
        assert len(outcomes) > 25


CALLS = ("open", "write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")


def sweep(folder: str) -> None:
    """For k = 1, 2, …: a forked process saves and kills itself at its k-th system call that changes files."""
    torch.set_num_threads(1)
    # A killed process leaves the page cache whole, so that memory serves as well as a disk, and is quicker.
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else folder) as root:
        save_small(Path(root) / "first", 10, 1.0)
        print(json.dumps([sweep_one(Path(root), step) for step in (20, 10)]))


def sweep_one(root: Path, step: int) -> list[str]:
    outcomes = []
    for k in range(1, 1000):
        where = root / f"{step}-{k}"
        shutil.copytree(root / "first", where)
        child = os.fork()
        if not child:
            kill_at(k)
            save_small(where, step, 2.0)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        model = torch.nn.Linear(3, 2)
        checkpoints = Checkpoints(where, Mesh(), keep=1)
        path = checkpoints.last()
        assert path is not None, k
        state = checkpoints.load(path, model, None)
        values = set(model.weight.flatten().tolist())
        assert values == {state["value"]}, (k, state, values)
        save_small(where, 30, 3.0)  # the run goes on as if nothing had been
        assert checkpoints.last() == where / "step-00000030"
        assert sorted(path.name for path in where.iterdir()) == ["last", "step-00000030"], k
        outcomes.append("1 old" if state["value"] == 1.0 else "2 new")
        if status == 0:
            return outcomes
        assert os.WTERMSIG(status) == signal.SIGKILL, status
    raise AssertionError("a save of more than a thousand calls")


def save_small(folder: Path, step: int, value: float) -> None:
    model = torch.nn.Linear(3, 2)
    torch.nn.init.constant_(model.weight, value)
    checkpoints = Checkpoints(folder, Mesh(), keep=1)
    checkpoints.save(step, model, None, {"value": value})
    checkpoints.finish()
    checkpoints._thread.shutdown()


def kill_at(k: int) -> None:
    """Make this process kill itself in the middle of its k-th call."""
    lock, count = threading.Lock(), 0

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            with lock:
                count += 1
                if count == k:
                    if name == "write":
                        real(args[0], args[1][: len(args[1]) // 2])  # torn
                    os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        setattr(os, name, call)

    for name in CALLS:
        wrap(name)


# A disk that fills up.


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of 1 MiB where mounting is permitted; gives whether it is one."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        mounted = False
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(folder)], check=True)


def fill_disk(folder: str, mounted: bool, on_error: Any) -> list[Any]:
    mesh = Mesh(dp_shard=2)
    small, large = (parallelize(tiny_model("llama", vocab_size=n), mesh) for n in (97, 16000))
    checkpoints = Checkpoints(Path(folder), mesh, on_error=on_error)
    checkpoints.save(1, small, None, {})
    events: list[Any] = checkpoints.finish()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if not mounted:  # the kernel's other way to refuse a write
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, limits[1]))
    try:
        checkpoints.save(2, large, None, {})
        try:
            while len(events) < 2:
                events += checkpoints.poll()
        except CheckpointError as error:
            events.append(str(error))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    leftovers = [path.name for path in Path(folder).iterdir()]
    last = checkpoints.last()
    assert last is not None
    checkpoints.load(last, small, None)
    checkpoints.save(3, small, None, {})
    return [last.name, sorted(leftovers), *events, *checkpoints.finish()]


@pytest.mark.parametrize("on_error", ["stop", "continue"])
def test_a_full_disk_stops_or_is_reported_on_every_rank(tmp_path: Path, on_error: str) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk) as mounted:
        reason = "No space left on device" if mounted else "File too large"
        results = ranks.run(fill_disk, 2, str(disk), mounted, on_error)
        assert results[0][1] == ["last", "step-00000001"]  # as seen by the rank that clears away
        for last, _, first, second, third in results:
            assert last == "step-00000001"
            assert isinstance(first, Published) and first.step == 1
            if on_error == "stop":
                assert "step 2 could not be written" in second and reason in second
            else:
                assert isinstance(second, Failed) and second.step == 2 and reason in second.reason
            assert isinstance(third, Published) and third.step == 3


def lose_the_folder(folder: str) -> str:
    mesh = Mesh(dp_shard=2)
    model = parallelize(tiny_model("llama"), mesh)
    checkpoints = Checkpoints(Path(folder) / "run", mesh)
    checkpoints.save(1, model, None, {})
    checkpoints.finish()
    if mesh.rank == 0:
        os.rename(Path(folder) / "run", Path(folder) / "elsewhere")
    checkpoints.save(2, model, None, {})
    checkpoints.finish()
    return "unreachable"


def test_a_missing_folder_is_an_error_on_every_rank(tmp_path: Path) -> None:
    for error in ranks.errors(lose_the_folder, 2, str(tmp_path)):
        assert error.kind == "CheckpointError" and "No such file or directory" in error.message
    assert not (tmp_path / "run").exists()


def test_the_checksum_of_a_file_is_that_of_its_bytes(tmp_path: Path) -> None:
    parts = [b"abc", memoryview(bytes(range(256)) * 70_000), b""]
    record = files.write_file(tmp_path / "file", parts)
    data = (tmp_path / "file").read_bytes()
    assert data == b"".join(parts) and record == (len(data), zlib.crc32(data))
    assert files.read_record(tmp_path / "file") == record
