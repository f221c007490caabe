"""A record becomes what the stock processor makes of it, and its length is known without decoding."""

from __future__ import annotations

import copy
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers.utils import is_torchvision_available

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.media.processor import VideoSettings, load_processor
from seqbraid.data.pack import pack
from seqbraid.data.tiny import VOCABULARY
from seqbraid.models.tiny.media import MEDIA_FAMILIES
from tests.helpers.conversations import (
    END,
    Sounding,
    as_string,
    ask,
    check_labels,
    random_record,
    said,
    stock_sample,
)

soundfile = pytest.importorskip("soundfile")
av = pytest.importorskip("av")


@pytest.mark.parametrize("name", [*MEDIA_FAMILIES, "llama", "qwen3_5_text"])
def test_samples_equal_the_stock_processor(name: str, models: Any, folder: Path) -> None:
    model, processor = models[name]
    kinds = ["image", "audio"] if name == "qwen3_omni" else ["image"] if name in MEDIA_FAMILIES else []
    media = MediaFiles(folder)
    encoder = SampleEncoder(processor, model.config, media)
    chance = random.Random(name)
    samples = []
    for rounds in (1, 1, 2, 3, 4):
        record = random_record(chance, kinds, rounds)
        sample = encoder.encode(record)
        assert encoder.length(record) == len(sample["input_ids"])
        check_labels(encoder, sample, record)
        samples.append(sample)
        if not kinds:
            plain = [m | {"content": as_string(m["content"])} for m in record["messages"]]
            wanted = processor.apply_chat_template(plain, return_dict=True, return_tensors="pt")
            assert sample["input_ids"].tolist() == wanted["input_ids"][0].tolist()
            continue
        wanted = stock_sample(processor, record, media)
        assert sample["input_ids"].tolist() == wanted["input_ids"][0].tolist()
        for key in ("pixel_values", "image_grid_thw", "input_features", "feature_attention_mask"):
            assert (key in sample) == (key in wanted), key
            if key in sample:
                assert torch.equal(sample[key], wanted[key]), key
    batch = pack(samples, model.config)
    assert batch.label_tokens == sum(int((s["labels"][1:] != -100).sum()) for s in samples)


@pytest.mark.parametrize("name", [*MEDIA_FAMILIES, "llama", "qwen3_5_text"])
def test_a_tiny_model_starts_at_the_loss_of_a_guess(name: str, models: Any, folder: Path) -> None:
    model, processor = models[name]
    encoder = SampleEncoder(processor, model.config, MediaFiles(folder))
    ids = encoder.encode(random_record(random.Random(0), [], 3))["input_ids"][None]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss
    assert abs(float(loss) - np.log(VOCABULARY)) < 0.1


def test_lengths_need_no_pixels(models: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, processor = models["qwen3_omni"]
    encoder = SampleEncoder(
        processor, model.config, Sounding(folder), video_min_pixels=64, video_max_pixels=99
    )
    record = random_record(random.Random(3), ["image", "video", "audio"], 3)
    wanted = len(encoder.encode(record)["input_ids"])
    for method in ("image", "video", "audio"):
        monkeypatch.setattr(MediaFiles, method, None)
        monkeypatch.setattr(Sounding, method, None)
    assert encoder.length(record) == wanted


def test_wishes_of_an_item_win_over_those_of_the_encoder(models: Any, folder: Path) -> None:
    model, processor = models["qwen3_vl"]

    def tokens(part: dict[str, Any], **options: Any) -> int:
        encoder = SampleEncoder(processor, model.config, MediaFiles(folder), **options)
        sample = encoder.encode(ask(part))
        return int((sample["input_ids"] == getattr(model.config, f"{part['type']}_token_id")).sum())

    image = {"type": "image", "image": "wide.png"}  # 50×17 pixels: 48×16, of which a token is 8×8
    assert tokens(image) == 12
    assert tokens(image, max_pixels=256) == tokens(image | {"max_pixels": 256}) == 3
    assert tokens(image | {"max_pixels": 1024}, max_pixels=256) == 12
    video = {
        "type": "video",
        "video": "ball.mp4",
    }  # 24×40 pixels: 15 tokens a step; 2 a second of 2.6 s: 5 frames
    assert tokens(video) == 3 * 15
    assert tokens(video, fps=1.0) == tokens(video | {"fps": 1.0}) == 1 * 15
    assert tokens(video | {"nframes": 8}) == 4 * 15
    assert tokens(video, max_frames=3) == 2 * 15


def test_a_token_that_only_begins_in_the_prompt_is_not_learnt(models: Any, folder: Path) -> None:
    """The prompt ends in a line break; one more makes both one token, which the model could not generate."""
    model, tokenizer = models["llama"]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(["\n\n"])
    encoder = SampleEncoder(tokenizer, model.config, MediaFiles(folder))
    sample = encoder.encode({"query": "hi", "response": "\nyes"})
    assert tokenizer.decode(sample["labels"][sample["labels"] != -100]) == "yes<|im_end|>"


def test_white_space_is_learnt_where_the_tokenizer_leaves_it_out_of_its_tokens(
    models: Any, folder: Path
) -> None:
    """As Llama 3's does."""
    model, tokenizer = models["llama"]
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    encoder = SampleEncoder(tokenizer, model.config, MediaFiles(folder))
    record = {"query": "so", "response": " yes  \n\n it  is "}
    sample = encoder.encode(record)
    assert tokenizer.decode(sample["labels"][sample["labels"] != -100]) == record["response"] + END


def test_templates_that_forget_media_are_refused(models: Any, folder: Path) -> None:
    model, processor = models["qwen3_vl"]
    forgetful = copy.copy(processor)
    forgetful.chat_template = processor.chat_template.replace("part.type ~ '_pad|>", "part.type ~ '_pat|>")
    encoder = SampleEncoder(forgetful, model.config, MediaFiles(folder))
    with pytest.raises(
        ValueError, match="conversation has image, but the chat template writes placeholders for nothing"
    ):
        encoder.length(ask({"type": "image", "image": "wide.png"}))


@pytest.mark.parametrize("kind", ["image", "video"])
def test_media_of_the_assistant_are_not_learnt(kind: str, models: Any, folder: Path) -> None:
    model, processor = models["qwen3_vl"]
    source = {"image": "wide.png", "video": "ball.mp4"}[kind]
    answer = [
        {"type": "text", "text": "see"},
        {"type": kind, kind: source},
        {"type": "text", "text": "there"},
    ]
    encoder = SampleEncoder(processor, model.config, MediaFiles(folder))
    sample = encoder.encode({"messages": [said("user", "Show it."), said("assistant", answer)]})
    learnt = sample["labels"][sample["labels"] != -100]
    assert processor.tokenizer.decode(learnt) == f"seethere{END}"


def test_an_encoder_can_be_sent_to_a_worker(models: Any, folder: Path) -> None:
    model, processor = models["qwen3_omni"]
    encoder = SampleEncoder(processor, model.config, MediaFiles(folder))
    record = random_record(random.Random(5), ["image", "audio"], 2)
    sent = pickle.loads(pickle.dumps(encoder))
    wanted, found = encoder.encode(record), sent.encode(record)
    assert wanted.keys() == found.keys() and torch.equal(wanted["input_ids"], found["input_ids"])


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("llama", ask({"type": "image", "image": "wide.png"}), "takes only text"),
        ("qwen3_vl", ask({"type": "audio", "audio": "short.wav"}), "takes only image, video"),
        ("qwen3_vl", ask({"type": "image", "image": "none.png"}), "none.png"),
        ("qwen3_vl", ask({"type": "image", "image": "short.wav"}), "short.wav"),
        ("qwen3_vl", ask({"type": "image", "image": "wide.png", "resized_height": 8}), "resized_height"),
        (
            "qwen3_vl",
            ask({"type": "image", "image": "wide.png", "min_pixels": 10**7}),
            "more than max_pixels",
        ),
        ("qwen3_vl", ask({"type": "image", "image": "wide.png", "max_pixels": 1}), "min_pixels=64 is more"),
        ("qwen3_vl", ask({"type": "video", "video": "ball.mp4", "video_start": 1}), "video_start"),
        ("qwen3_vl", ask("look: <|image_pad|>"), "special token"),
        ("qwen3_omni", ask("look: <|audio_pad|>"), "special token"),
        ("qwen3_omni", ask({"type": "audio", "audio": "tiny.wav"}), "too short"),
        ("llama", ask("half a character: \ud800"), "character|Unicode|surrogate"),
        ("llama", {"messages": []}, "at least one"),
        ("llama", 17, "JSON object"),
    ],
)
def test_bad_records_are_value_errors(name: str, record: Any, said: str, models: Any, folder: Path) -> None:
    soundfile.write(folder / "tiny.wav", np.zeros(100, np.float32), 16000)
    model, processor = models[name]
    encoder = SampleEncoder(processor, model.config, MediaFiles(folder))
    for method in (encoder.length, encoder.encode):
        with pytest.raises(ValueError, match=said):
            method(record)


def test_a_processor_of_another_model_is_refused(models: Any, folder: Path) -> None:
    media = MediaFiles(folder)
    (vision, vision_processor), (text, tokenizer) = models["qwen3_vl"], models["llama"]
    with pytest.raises(ValueError, match="takes text only"):
        SampleEncoder(vision_processor, text.config, media)
    with pytest.raises(ValueError, match="takes images, videos or audio"):
        SampleEncoder(tokenizer, vision.config, media)
    with pytest.raises(ValueError, match="has no audio encoder"):
        SampleEncoder(vision_processor, vision.config, media, use_audio_in_video=True)
    with pytest.raises(ValueError, match="unknown option 'frames'"):
        SampleEncoder(vision_processor, vision.config, media, frames=3)
    other = copy.deepcopy(vision.config)
    other.image_token_id += 1
    with pytest.raises(ValueError, match="image_token_id"):
        SampleEncoder(vision_processor, other, media)
    small = copy.deepcopy(text.config)
    small.vocab_size = 100
    with pytest.raises(ValueError, match="vocabulary is 100"):
        SampleEncoder(tokenizer, small, media)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_omni", "llama"])
def test_a_saved_processor_comes_back(name: str, models: Any, folder: Path, tmp_path: Path) -> None:
    model, processor = models[name]
    kinds = {"qwen3_vl": ["image", "video"], "qwen3_omni": ["image", "audio"], "llama": []}[name]
    processor.save_pretrained(tmp_path)
    record = random_record(random.Random(2), kinds, 3)
    wanted, found = (
        SampleEncoder(p, model.config, MediaFiles(folder)).encode(record)
        for p in (processor, load_processor(tmp_path))
    )
    assert wanted.keys() == found.keys()
    for key in wanted:
        if key != "pixel_values" or not is_torchvision_available():  # which resizes images in its own way
            assert np.array_equal(wanted[key], found[key]), key


@pytest.mark.parametrize("name", ["qwen3_vl", "llama"])
def test_a_tokenizer_without_its_vocabulary_is_refused(name: str, models: Any, tmp_path: Path) -> None:
    """Transformers makes one of special tokens alone, for which any text is nothing."""
    models[name][1].save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no vocabulary, .*tokenizer\.json"):
        load_processor(tmp_path)


def test_old_checkpoints_keep_their_settings_in_other_files(models: Any, tmp_path: Path) -> None:
    """As the published Qwen3-VL has them: one file for images, one for videos, `min_pixels` beside `size`."""
    import json

    _, processor = models["qwen3_vl"]
    processor.tokenizer.save_pretrained(tmp_path)
    image = {"image_processor_type": "Qwen2VLImageProcessorFast", "processor_class": "Qwen3VLProcessor"}
    image |= {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 64, "longest_edge": 4096}}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 4, "fps": 5}
    video |= {"size": {"shortest_edge": 512, "longest_edge": 9999}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(image))
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(video))
    found = load_processor(tmp_path)
    assert type(found).__name__ == "Qwen3VLProcessor" and found.chat_template == processor.chat_template
    assert found.image_processor.patch_size == 4 and found.image_processor.size["longest_edge"] == 4096
    settings = found.video_processor
    assert (settings.patch_size, settings.fps, settings.size["longest_edge"], settings.merge_size) == (
        4,
        5,
        9999,
        2,
    )
    old = VideoSettings("Qwen2VLVideoProcessor", min_pixels=99, max_pixels=777)
    assert old.size == {"shortest_edge": 99, "longest_edge": 777}
    for broken, reason in (("{", "not JSON"), ("[]", "not a JSON object")):
        (tmp_path / "preprocessor_config.json").write_text(broken)
        with pytest.raises(ValueError, match=reason):
            load_processor(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        load_processor(tmp_path / "nowhere")
