"""What is written is what stock `from_pretrained` loads, and what else the source held is still there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import seqbraid as sb
from seqbraid import Mesh
from seqbraid.data.media.processor import load_processor
from seqbraid.data.tiny import tiny_training_model
from seqbraid.models.tiny.decoders import COMMON, EXPERTS, tiny_model
from seqbraid.models.tiny.media import MEDIA_FAMILIES, TEXT, tiny_media_config, tiny_media_model
from seqbraid.models.tiny.media_samples import media_sample
from seqbraid.models.tiny.samples import random_samples
from seqbraid.train.after.export import export_checkpoint
from seqbraid.train.export import export
from seqbraid.train.lora import LoraOptions, add_lora
from seqbraid.train.weights import empty_model, load_stock, read_headers, weights_fingerprint
from seqbraid.verify.reference import stock_step
from tests.helpers import ranks

TEXT_FAMILIES = ["llama", "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5_text"]


def sample_of(config: Any) -> dict[str, Any]:
    if config is config.get_text_config():
        return random_samples([30], config.vocab_size)[0]
    return media_sample(config, ["image", "video"], 3, [4, 3, 5], max_side=3, encoder_inputs=True)


def logits(model: PreTrainedModel, sample: dict[str, Any] | None = None) -> Tensor:
    return stock_step(model, [sample or sample_of(model.config)]).logits[0]


def names(folder: Path) -> set[str]:
    return set(read_headers(folder))


@pytest.mark.parametrize("family", [*TEXT_FAMILIES, *MEDIA_FAMILIES])
def test_stock_loads_what_is_exported(family: str, tmp_path: Path) -> None:
    model, processor = tiny_training_model(family)
    expected = logits(model)
    model.save_pretrained(tmp_path / "stock")
    report = export(sb.parallelize(model), None, tmp_path / "ours", processor)
    assert report is not None and report.files == ("model.safetensors",) and report.extra == ()
    assert names(tmp_path / "ours") == names(tmp_path / "stock")
    loaded, found = type(model).from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(found.values()), found
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-6, atol=1e-6)
    for file in ("config.json", "generation_config.json"):
        ours, stock = (json.loads((tmp_path / kind / file).read_text()) for kind in ("ours", "stock"))
        assert ours == stock
    message = [{"role": "user", "content": "What is 42?"}]
    again = load_processor(tmp_path / "ours")
    assert type(again) is type(processor)
    assert again.apply_chat_template(message, tokenize=False) == processor.apply_chat_template(
        message, tokenize=False
    )
    inputs: dict[str, Any] = {"text": ["What is <|im_end|> 42?"]}
    if family in MEDIA_FAMILIES:
        image = Image.effect_noise((19, 14), 60).convert("RGB")
        inputs = {"text": ["<|vision_start|><|image_pad|><|vision_end|> 42?"], "images": [image]}
    ours, theirs = again(**inputs, return_tensors="pt"), processor(**inputs, return_tensors="pt")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)


def source(model: PreTrainedModel, folder: Path, **extra: Tensor) -> None:
    """A checkpoint as it is found on the hub: several files, and tensors that the class does not know."""
    model.save_pretrained(folder, max_shard_size="20KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1
    save_file(extra, folder / "extra.safetensors")
    index["weight_map"] |= dict.fromkeys(extra, "extra.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def raw(folder: Path, name: str) -> tuple[torch.dtype, bytes]:
    tensor = next(
        load_file(path)[name]
        for path in folder.glob("*.safetensors")
        if name in safe_open(path, "pt").keys()  # noqa: SIM118
    )
    return tensor.dtype, tensor.view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_moe"])
def test_tensors_the_class_does_not_know_are_carried_over(family: str, tmp_path: Path) -> None:
    model = (tiny_media_model if family in MEDIA_FAMILIES else tiny_model)(family, dtype=torch.bfloat16)
    not_a_number = torch.tensor([0x7FC1, 0x0001, 0xFFFF], dtype=torch.uint16).view(torch.bfloat16)
    extra = {
        "mtp.norm.weight": not_a_number,
        "mtp.layers.0.mlp.experts.0.gate_proj.weight": torch.randn(60, 70).bfloat16(),
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.randn(60, 70),
        "mtp.scale": torch.randn(9).to(torch.float8_e4m3fn),
    }
    source(model, tmp_path / "source", **extra)
    stock, found, folder = load_stock(tmp_path / "source", torch.float32)
    assert found == tuple(sorted(extra)) and folder == tmp_path / "source"
    with torch.no_grad():
        for p in stock.parameters():
            p.add_(0.01)
    report = export(stock, folder, tmp_path / "out", None, shard_bytes=30_000)
    assert report is not None and report.extra == tuple(sorted(extra)) and len(report.files) > 2
    assert report.dtype == torch.bfloat16
    assert {n: t[1:] for n, t in read_headers(folder).items()} == {
        n: t[1:] for n, t in read_headers(tmp_path / "out").items()
    }
    for name in extra:
        assert raw(tmp_path / "out", name) == raw(folder, name)
    for file in report.files:
        sizes = [t.num_bytes for t in read_headers(tmp_path / "out").values() if t.file.name == file]
        assert sum(sizes) <= 30_000 or len(sizes) == 1
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == names(folder)
    assert index["metadata"]["total_size"] == report.total_bytes
    again = type(stock).from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    for name, p in again.named_parameters():
        assert torch.equal(p, stock.get_parameter(name).bfloat16()), name
    wide = export(stock, folder, tmp_path / "wide", None, dtype=torch.float32)
    assert wide is not None
    again = type(stock).from_pretrained(tmp_path / "wide")
    assert again.dtype == torch.float32
    torch.testing.assert_close(logits(again), logits(stock), rtol=1e-6, atol=1e-6)


def test_experts_stay_fused_where_the_source_has_them_fused(tmp_path: Path) -> None:
    """Stock saving would split them, and leave the old ones beside the new."""
    model = tiny_media_model("qwen3_5_moe")
    model.save_pretrained(tmp_path / "source", save_original_format=False)
    assert "model.language_model.layers.0.mlp.experts.gate_up_proj" in names(tmp_path / "source")
    for trained in (load_stock(tmp_path / "source", torch.float32).model, model):
        out = tmp_path / f"out{trained is model}"
        report = export(trained, tmp_path / "source", out)
        assert report is not None and not report.extra and names(out) == names(tmp_path / "source")
        torch.testing.assert_close(logits(type(model).from_pretrained(out)), logits(model))


def test_a_stale_copy_of_a_tied_head_is_not_carried_over(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    stock, extra, _ = load_stock(tmp_path / "source", torch.float32)
    assert not extra
    with torch.no_grad():
        stock.lm_head.weight.mul_(1.5)
    export(stock, tmp_path / "source", tmp_path / "out")
    assert "lm_head.weight" not in names(tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(again), logits(stock), rtol=1e-6, atol=1e-6)


def whole_omni() -> PreTrainedModel:
    """Thinker, talker and code2wav, tiny."""
    from transformers import Qwen3OmniMoeConfig, Qwen3OmniMoeForConditionalGeneration

    text = TEXT | EXPERTS | {"num_hidden_layers": 1, "shared_expert_intermediate_size": 16}
    config = Qwen3OmniMoeConfig(
        thinker_config=tiny_media_config("qwen3_omni").to_dict(),
        talker_config={
            "text_config": text,
            "code_predictor_config": COMMON | {"num_code_groups": 4, "num_hidden_layers": 1},
            "thinker_hidden_size": COMMON["hidden_size"],
            "spatial_merge_size": 2,
            "num_code_groups": 4,
        },
        code2wav_config={
            "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
            "intermediate_size": 16, "decoder_dim": 16, "codebook_size": 8, "num_quantizers": 2,
            "upsample_rates": [2, 2], "upsampling_ratios": [2],
        },
    )  # fmt: skip
    model = Qwen3OmniMoeForConditionalGeneration(config)
    with torch.no_grad():
        for p in model.parameters():  # stock code leaves the talker's experts as it finds the memory
            p.normal_(std=0.2)
    return model


def test_a_whole_omni_comes_out_whole(tmp_path: Path) -> None:
    before = whole_omni()
    before.generation_config.max_new_tokens = 77
    before.save_pretrained(tmp_path / "source")
    thinker, extra, folder = load_stock(tmp_path / "source", torch.float32)
    assert type(thinker).__name__ == "Qwen3OmniMoeThinkerForConditionalGeneration"
    assert extra and {name.split(".")[0] for name in extra} == {"talker", "code2wav"}
    for name, p in thinker.named_parameters():
        assert torch.equal(p, before.thinker.get_parameter(name)), name
    with torch.no_grad():
        for p in thinker.parameters():
            p.mul_(1.01)
    # As after a run, where the model was built from its config and knows nothing of how it was loaded.
    thinker.config.save_pretrained(tmp_path / "run")
    built = empty_model(tmp_path / "run", torch.float32)
    built.load_state_dict(thinker.state_dict())
    for number, trained in enumerate((thinker, built)):
        out = tmp_path / f"out{number}"
        report = export(trained, folder, out, None, shard_bytes=200_000)
        assert report is not None and report.extra == extra and names(out) == names(folder)
        again, found = type(before).from_pretrained(out, output_loading_info=True)
        assert not any(found.values()), found
        assert again.generation_config.max_new_tokens == 77
        for name, p in again.named_parameters():
            if name.startswith("thinker."):
                assert torch.equal(p, thinker.get_parameter(name.removeprefix("thinker."))), name
            else:
                assert torch.equal(p, before.get_parameter(name)), name
        sample = sample_of(thinker.config)
        reloaded = load_stock(out, torch.float32)
        assert reloaded.extra == extra
        torch.testing.assert_close(logits(reloaded.model, sample), logits(thinker, sample))


def test_adapters_are_merged(tmp_path: Path) -> None:
    model = tiny_media_model("qwen3_5")
    model.save_pretrained(tmp_path / "source")
    add_lora(model, LoraOptions(rank=4))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    expected = logits(model)
    export(sb.parallelize(model), tmp_path / "source", tmp_path / "out")
    assert names(tmp_path / "out") == names(tmp_path / "source")
    found = logits(type(model).from_pretrained(tmp_path / "out"))
    assert (found - expected).norm() <= 1e-5 * expected.norm()
    assert (logits(tiny_media_model("qwen3_5")) - expected).norm() > 0.01 * expected.norm()


def export_on_ranks(family: str, folder: str) -> bool:
    model = tiny_media_model(family)
    return export(sb.parallelize(model, Mesh(ring=2)), None, Path(folder)) is not None


def test_shards_of_two_ranks_are_gathered_on_the_first(tmp_path: Path) -> None:
    assert ranks.run(export_on_ranks, 2, "qwen3_vl", str(tmp_path / "out")) == [True, False]
    again = load_stock(tmp_path / "out", torch.float32).model
    for name, p in tiny_media_model("qwen3_vl").named_parameters():
        assert torch.equal(p, again.get_parameter(name)), name
    for raised in ranks.errors(export_on_ranks, 2, "qwen3_vl", str(tmp_path / "out")):
        assert "exists already" in raised.message


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    model = tiny_model("llama")
    monkeypatch.setattr("seqbraid.train.export.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        export(model, None, tmp_path / "deep" / "out")
    assert list((tmp_path / "deep").iterdir()) == []


@pytest.mark.parametrize("lora", [False, True])
def test_a_runs_checkpoint_is_exported(lora: bool, tmp_path: Path) -> None:
    from seqbraid.train.checkpoint.checkpoints import Checkpoints

    model, processor = tiny_training_model("qwen3_5_text")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "source")
    processor.save_pretrained(tmp_path / "source")
    tensors = load_file(tmp_path / "source" / "model.safetensors") | {"mtp.fc.weight": torch.randn(3, 5)}
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    trained = load_stock(tmp_path / "source", torch.float32).model
    if lora:
        add_lora(trained, LoraOptions(4, 16.0), seed=3)
    with torch.no_grad():
        for p in trained.parameters():
            p.add_(0.02)
    run, mesh = tmp_path / "run", Mesh()
    trained.config.save_pretrained(run / "model")
    processor.save_pretrained(run / "model")
    settings = f"model: {tmp_path / 'source'}\nout: {run}\ndata: {{train: a.jsonl}}\n"
    settings += "train: {steps: 3, batch_tokens: 8192}\n" + f"lora: {{rank: {4 if lora else 0}}}\n"
    (run / "config.yaml").write_text(settings)
    checkpoints = Checkpoints(run / "checkpoints", mesh, asynchronous=False)
    checkpoints.save(30, sb.parallelize(trained, mesh), None, {"step": 30})
    checkpoints.mark_best(30)
    for which in ("last", "best", "30"):
        report = export_checkpoint(run, which, tmp_path / which, torch.float32)
        assert report.extra == ("mtp.fc.weight",)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "last")
    expected = logits(trained)
    assert (logits(again) - expected).norm() <= 1e-5 * expected.norm()
    assert load_processor(tmp_path / "last")("42")["input_ids"] == processor("42")["input_ids"]
    assert export_checkpoint(run, 30, tmp_path / "own").dtype == torch.bfloat16
    for which, message in (("31", "it has 30"), ("../x", "has no checkpoint")):
        with pytest.raises(ValueError, match=message):
            export_checkpoint(run, which, tmp_path / "none")


def test_a_fingerprint_tells_weights_apart(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    weights, found = tmp_path / "model.safetensors", set()
    whole = weights.read_bytes()
    tensors = load_file(weights)
    last = max(tensors, key=lambda name: tensors[name].numel())
    renamed = {name if name != last else f"{name}.other": x for name, x in tensors.items()}
    save_file(renamed, weights, metadata={"format": "pt"})
    found.add(weights_fingerprint(tmp_path))
    for place in (len(whole) // 2, len(whole) - 1):
        changed = bytearray(whole)
        changed[place] ^= 1
        weights.write_bytes(changed)
        found.add(weights_fingerprint(tmp_path))
    weights.write_bytes(whole)
    found.add(weights_fingerprint(tmp_path))
    assert len(found) == 4
    weights.touch()
    assert weights_fingerprint(tmp_path) in found


def test_checkpoints_that_are_not_loaded(tmp_path: Path) -> None:
    model = tiny_model("qwen3_moe")
    model.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    on_meta = load_stock(tmp_path, device="meta").model
    assert all(p.is_meta for p in on_meta.parameters())
    whole = load_file(weights)

    def refused(message: str) -> None:
        with pytest.raises(ValueError, match=message):
            load_stock(tmp_path)

    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    save_file({k: v for k, v in whole.items() if k != name}, weights, metadata={"format": "pt"})
    refused("is missing 1 of the 25 weights")
    weights.write_bytes(weights.read_bytes()[:-9])
    refused("not a complete safetensors file")
    weights.unlink()
    torch.save(whole, tmp_path / "pytorch_model.bin")
    refused("only pytorch_model.bin; only safetensors are read")
    save_file(whole, tmp_path.parent / "outside.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(whole, "../outside.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("not in that folder")
    (tmp_path / "model.safetensors.index.json").write_text("[1]")
    refused("not an index")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "fp8"}})
    )
    refused("quantized")
    evil = "import pathlib\npathlib.Path(__file__).with_name('ran').touch()\nclass C: pass\n"
    (tmp_path / "modeling_x.py").write_text(evil)
    remote = {
        "model_type": "x",
        "auto_map": {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.C"},
    }
    (tmp_path / "config.json").write_text(json.dumps(remote))
    refused("needs its own code .* never run")
    (tmp_path / "config.json").write_text(json.dumps(config | {"auto_map": remote["auto_map"]}))
    save_file(whole, weights, metadata={"format": "pt"})
    assert type(load_stock(tmp_path).model) is type(model)
    assert not list(tmp_path.rglob("ran"))
    (tmp_path / "config.json").unlink()
    refused("no config.json")
    with pytest.raises(ValueError, match="neither a folder nor"):
        load_stock("a/b/c")
