"""A record becomes what the stock processor makes of it, and its length is known without decoding."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import processors
from transformers.utils import is_torchvision_available

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import AudioInfo, MediaFiles
from seqbraid.data.media.processor import VideoSettings, load_processor
from seqbraid.data.pack import pack
from seqbraid.data.tiny import VOCABULARY, tiny_training_model
from seqbraid.models.positions import sample_positions
from seqbraid.models.tiny.media import MEDIA_FAMILIES

soundfile = pytest.importorskip("soundfile")
av = pytest.importorskip("av")

FRAMES, FPS, FRAME = 21, 8, (24, 40)
CLIPS = {"short.wav": (700, 16000), "long.flac": (16333, 8000), "even.wav": (3200, 16000)}
WORDS = ("what", "is", "it", "?", "a", "the number", "42", "naïve", "<b>", "é\n\n", "{x}", "日本")
END = "<|im_end|>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("media")
    chance = np.random.default_rng(0)
    for name, size in {"wide.png": (50, 17), "tall.jpg": (20, 64), "dot.png": (3, 3)}.items():
        Image.fromarray(chance.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)).save(root / name)
    for name, (length, rate) in CLIPS.items():
        soundfile.write(root / name, chance.normal(0, 0.1, length).astype(np.float32), rate)
    with av.open(str(root / "ball.mp4"), "w") as file:
        stream = file.add_stream("mpeg4", rate=FPS)
        stream.height, stream.width, stream.pix_fmt = *FRAME, "yuv420p"
        for number in range(FRAMES):
            picture = np.full((*FRAME, 3), 10 * number, np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        file.mux(stream.encode())
    return root


@pytest.fixture(scope="module")
def models() -> dict[str, tuple[Any, Any]]:
    names = (*MEDIA_FAMILIES, "llama", "qwen3_5_text")
    return {name: tiny_training_model(name) for name in names}


def random_record(chance: random.Random, kinds: Sequence[str], rounds: int) -> dict[str, Any]:
    """A conversation with media of these kinds among its words."""
    files = {"image": ["wide.png", "tall.jpg", "dot.png"], "audio": list(CLIPS), "video": ["ball.mp4"]}

    def words() -> str:
        return " ".join(chance.choice(WORDS) for _ in range(chance.randint(1, 6)))

    messages: list[dict[str, Any]] = []
    if chance.random() < 0.5:
        messages.append({"role": "system", "content": words()})
    for _ in range(rounds):
        parts: list[dict[str, Any]] = [{"type": "text", "text": words()}]
        for _ in range(chance.randint(0, 3) if kinds else 0):
            kind = chance.choice(kinds)
            parts.insert(chance.randint(0, len(parts)), {"type": kind, kind: chance.choice(files[kind])})
        messages.append({"role": "user", "content": parts})
        messages.append({"role": "assistant", "content": words(), "loss": chance.random() < 0.7})
    messages[-1]["loss"] = True
    return {"messages": messages}


def as_string(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def parts_of(record: dict[str, Any], kind: str) -> list[str]:
    return [
        part[kind]
        for message in record["messages"]
        if not isinstance(message["content"], str)
        for part in message["content"]
        if part["type"] == kind
    ]


def stock_sample(processor: Any, record: dict[str, Any], media: MediaFiles, **options: Any) -> Any:
    """What the stock processor gives for the whole conversation."""
    text = processor.apply_chat_template(copy.deepcopy(record["messages"]), tokenize=False)
    images = [media.image(source) for source in parts_of(record, "image")]
    sounds = [media.audio(source, 16000) for source in parts_of(record, "audio")]
    given = {key: value for key, value in {"images": images, "audio": sounds}.items() if value}
    return processor(text=[text], **given, **options, return_tensors="pt")


def check_labels(encoder: SampleEncoder, sample: dict[str, Any], record: dict[str, Any]) -> None:
    """Learnt are the assistant's words and the end of its turns, token by token, and nothing else."""
    ids, labels = sample["input_ids"], sample["labels"]
    learnt = labels != -100
    assert torch.equal(labels[learnt], ids[learnt])
    edges = learnt.int().diff(prepend=torch.zeros(1, dtype=torch.int)).eq(1).cumsum(0)
    texts = [
        encoder.tokenizer.decode(ids[learnt & (edges == number)]) for number in range(1, int(edges.max()) + 1)
    ]
    spoken = [m["content"] + END for m in record["messages"] if m["role"] == "assistant" and m["loss"]]
    assert texts == spoken


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


def stub_video_processor(processor: Any, grids: list[Sequence[int]], indices: list[list[int]]) -> Any:
    """The stock processor with a video processor that only knows the grids, which is all its text needs."""

    class Stub:
        merge_size = processor.video_processor.merge_size
        temporal_patch_size = processor.video_processor.temporal_patch_size

        def __call__(self, *_: Any, **__: Any) -> dict[str, Any]:
            metadata = [SimpleNamespace(fps=float(FPS), frames_indices=list(i)) for i in indices]
            return {"video_grid_thw": torch.tensor(grids), "video_metadata": metadata}

    stub = copy.copy(processor)
    stub.video_processor = Stub()
    return stub


class Sounding(MediaFiles):
    """Where videos have a sound."""

    def audio_info(self, ref: Any) -> AudioInfo:
        return AudioInfo(50000, 16000, 1) if ref.kind == "video" else super().audio_info(ref)

    def audio(self, ref: Any, sampling_rate: int) -> Any:
        if isinstance(ref, str) or ref.kind != "video":
            return super().audio(ref, sampling_rate)
        return np.sin(np.arange(50000, dtype=np.float32) / 9)


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5", "qwen3_omni", "qwen3_omni with sound"])
def test_videos_get_the_stock_text_and_frames(name: str, models: Any, folder: Path) -> None:
    with_sound = name.endswith("sound")
    model, processor = models[name.split()[0]]
    omni = name.startswith("qwen3_omni")
    options: dict[str, Any] = {"fps": 3.0, "max_frames": 6, "use_audio_in_video": with_sound}
    if omni:
        options |= {"video_min_pixels": 64, "video_max_pixels": 512}
    media = Sounding(folder)
    encoder = SampleEncoder(processor, model.config, media, **options)
    chance = random.Random(1)
    for rounds in (1, 2, 3):
        record = random_record(chance, ["image", "video", *["audio"] * omni], rounds)
        record["messages"][-2]["content"].append({"type": "video", "video": "ball.mp4"})
        sample = encoder.encode(record)
        assert encoder.length(record) == len(sample["input_ids"])
        check_labels(encoder, sample, record)
        videos = parts_of(record, "video")
        rules = encoder.media.frame_rules
        indices = rules.indices(FRAMES, FPS)
        patches, grid = rules.patches(media.video("ball.mp4", indices))
        assert len(indices) == 6 and sample["video_grid_thw"].tolist() == [list(grid)] * len(videos)
        assert torch.equal(sample["pixel_values_videos"], patches.repeat(len(videos), 1))
        stub = stub_video_processor(processor, [grid] * len(videos), [indices] * len(videos))
        wanted = stock_sample_with_videos(stub, record, media, with_sound, model.config if omni else None)
        assert sample["input_ids"].tolist() == wanted["input_ids"][0].tolist()
        if omni:
            assert sample["second_per_grid_ts"].tolist() == pytest.approx([2 / 3.0] * len(videos))
            assert sample["use_audio_in_video"] == with_sound
            for key in ("input_features", "feature_attention_mask"):
                assert (key in sample) == (key in wanted)
                assert key not in sample or torch.equal(sample[key], wanted[key])
        pack([sample], model.config)
        check_positions(model, sample)


def stock_sample_with_videos(stub: Any, record: Any, media: Any, with_sound: bool, omni: Any) -> Any:
    text = stub.apply_chat_template(copy.deepcopy(record["messages"]), tokenize=False)
    refs = [part for m in record["messages"] if not isinstance(m["content"], str) for part in m["content"]]
    sounds = [
        media.audio(part["audio"], 16000)
        if part["type"] == "audio"
        else media.audio(SimpleNamespace(kind="video"), 16000)
        for part in refs
        if part["type"] == "audio" or (part["type"] == "video" and with_sound)
    ]
    given: dict[str, Any] = {"videos": [np.zeros((2, 8, 8, 3), np.uint8)] * len(parts_of(record, "video"))}
    if images := [media.image(source) for source in parts_of(record, "image")]:
        given["images"] = images
    if omni:
        given |= {"fps": 3.0} | heard_by(stub, refs, with_sound)
        # The processor has a setting of its own for what the config says as well; the two must agree.
        given["position_id_per_seconds"] = omni.position_id_per_seconds
    if sounds:
        given["audio"] = sounds
    return stub(text=[text], **given, return_tensors="pt")


def heard_by(stub: Any, refs: list[dict[str, Any]], with_sound: bool) -> dict[str, Any]:
    """How the stock processor is told which sounds are those of videos; newer releases do not guess."""
    if not hasattr(stub, "load_audio_from_video"):
        return {"use_audio_in_video": with_sound}
    videos = count()
    slots = [
        next(videos) if part["type"] == "video" else None
        for part in refs
        if part["type"] in ("audio", "video")
    ]
    return {"load_audio_from_video": True, "audio_from_video_indices": slots} if with_sound else {}


def test_the_stock_processor_of_omni_has_sizes_of_its_own(models: Any, folder: Path) -> None:
    """Which it hands to the video processor with every call, over those that the checkpoint has."""
    omni = models["qwen3_omni"][1]
    stock = omni._merge_kwargs(type(omni).valid_processor_kwargs)["videos_kwargs"]["size"]
    for name, expected in (("qwen3_omni", stock["longest_edge"]), ("qwen3_vl", 8 * 32 * 32)):
        encoder = SampleEncoder(models[name][1], models[name][0].config, MediaFiles(folder))
        assert encoder.media.frame_rules.max_pixels == expected


def check_positions(model: Any, sample: dict[str, Any]) -> None:
    """Equal to the stock model's own."""
    ids = sample["input_ids"][None]
    grids = {key: sample.get(key) for key in ("image_grid_thw", "video_grid_thw")}
    found = sample_positions(sample, model.config)[1:]
    if "use_audio_in_video" in sample:
        mask = sample.get("feature_attention_mask")
        wanted, _ = model.get_rope_index(
            ids,
            **grids,
            attention_mask=torch.ones_like(ids),
            use_audio_in_video=sample["use_audio_in_video"],
            audio_seqlens=None if mask is None else mask.sum(1),
            second_per_grids=sample["second_per_grid_ts"],
        )
    else:
        types = torch.zeros_like(ids)
        types[ids == model.config.image_token_id] = 1
        types[ids == model.config.video_token_id] = 2
        wanted, _ = model.model.get_rope_index(ids, mm_token_type_ids=types.int(), **grids)
    assert torch.equal(found, wanted[:, 0].to(found.dtype))


@pytest.mark.skipif(not is_torchvision_available(), reason="the stock video processors need torchvision")
@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_omni"])
def test_videos_equal_the_stock_processor(name: str, models: Any, folder: Path, tmp_path: Path) -> None:
    model, processor = models[name]
    processor.save_pretrained(tmp_path)
    stock, media = load_processor(tmp_path), MediaFiles(folder)
    record = random_record(random.Random(0), ["image", "video"], 2)
    record["messages"][-2]["content"].append({"type": "video", "video": "ball.mp4"})
    sample = SampleEncoder(stock, model.config, media, fps=3.0).encode(record)
    videos = [media.video("ball.mp4", range(FRAMES)) for _ in parts_of(record, "video")]
    metadata = {"total_num_frames": FRAMES, "fps": float(FPS), "duration": FRAMES / FPS}
    given = {"fps": 3.0, "do_sample_frames": True, "video_metadata": [metadata] * len(videos)}
    wanted = stock_sample(stock, record, media, videos=videos, videos_kwargs=given)
    for key in ("input_ids", "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw"):
        assert (key in sample) == (key in wanted), key
        if key in sample:
            assert torch.equal(sample[key].flatten(), wanted[key].flatten()), key


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
        ValueError, match="media image, but the chat template writes placeholders for nothing"
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


def said(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def ask(part: dict[str, Any] | str, answer: Any = "ok") -> dict[str, Any]:
    content = part if isinstance(part, str) else [part]
    return {"messages": [said("user", content), said("assistant", answer)]}


@pytest.mark.parametrize(
    ("name", "record", "said"),
    [
        ("llama", ask({"type": "image", "image": "wide.png"}), "text alone"),
        ("qwen3_vl", ask({"type": "audio", "audio": "short.wav"}), "takes image, video"),
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
    with pytest.raises(ValueError, match="text alone"):
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
    for broken, said in (("{", "not JSON"), ("[]", "not a JSON object")):
        (tmp_path / "preprocessor_config.json").write_text(broken)
        with pytest.raises(ValueError, match=said):
            load_processor(tmp_path)
    with pytest.raises(ValueError, match="not a folder"):
        load_processor(tmp_path / "nowhere")
