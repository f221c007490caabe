"""Records of the formats that other tools document become the tokens and labels that those tools make."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from seqbraid.data.encode import SampleEncoder
from seqbraid.data.media.files import MediaFiles
from seqbraid.data.records.formats import FORMATS, check_ignored, parse_record
from seqbraid.data.tiny import tiny_training_model
from tests.helpers.conversations import END, WORDS

MODEL, TOKENIZER = tiny_training_model("qwen3_5_text")
EOS = TOKENIZER.eos_token_id


def encoder(**options: Any) -> SampleEncoder:
    return SampleEncoder(TOKENIZER, MODEL.config, MediaFiles(Path(".")), **options)


def ids_and_labels(record: dict[str, Any], **options: Any) -> tuple[list[int], list[int]]:
    one = encoder(**options)
    sample = one.encode(record)
    assert sample.keys() == {"input_ids", "labels"}
    assert one.length(record) == len(sample["input_ids"])
    return sample["input_ids"].tolist(), sample["labels"].tolist()


def tokens(text: str) -> list[int]:
    return list(TOKENIZER(text)["input_ids"])


def masked(ids: list[int], mask: list[int]) -> list[int]:
    return [one if kept else -100 for one, kept in zip(ids, mask, strict=True)]


def trl_plain(prompt: str, completion: str) -> tuple[list[int], list[int]]:
    """As TRL documents it: the end-of-text token is added to the completion unless it ends in it, both are
    tokenized together, and the loss covers what comes after as many tokens as the prompt has alone.
    """
    completion += "" if completion.endswith(TOKENIZER.eos_token) else TOKENIZER.eos_token
    ids, asked = tokens(prompt + completion), tokens(prompt)
    assert ids[: len(asked)] == asked
    return ids, masked(ids, [0] * len(asked) + [1] * (len(ids) - len(asked)))


def test_plain_text_is_all_labels_and_ends_once() -> None:
    for text in ("The sky is blue.", " a\n\nb ", "日本 naïve"):
        ids, labels = ids_and_labels({"text": text})
        assert ids == labels == [*tokens(text), EOS]
        assert ids_and_labels({"text": text + TOKENIZER.eos_token, "id": None}) == (ids, labels)
        other = ids_and_labels({"text": text}, end_of_document="<|endoftext|>")[0]
        assert other == [*tokens(text), TOKENIZER.convert_tokens_to_ids("<|endoftext|>")]


def test_a_tokenizer_that_adds_tokens_of_its_own_adds_them_once() -> None:
    _, tokenizer = tiny_training_model("llama")
    bos = tokenizer.convert_tokens_to_ids("<|im_start|>")
    template = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", bos), ("<|im_end|>", EOS)]
    )
    tokenizer._tokenizer.post_processor = template
    tokenizer.bos_token = "<|im_start|>"
    one = SampleEncoder(tokenizer, MODEL.config, MediaFiles(Path(".")))
    words = tokens("It is.")
    assert one.encode({"text": "It is."})["input_ids"].tolist() == [bos, *words, EOS]
    for prompt in ("It", "<|im_start|>It"):
        sample = one.encode({"prompt": prompt, "completion": " is."})
        assert sample["input_ids"].tolist() == [bos, *words, EOS]
        assert sample["labels"].tolist() == [
            -100,
            *masked(words, [int(n >= len(tokens("It"))) for n in range(len(words))]),
            EOS,
        ]


def test_prompt_and_completion_are_what_trl_makes_of_them() -> None:
    chance = random.Random(0)
    pairs = [
        ("The sky is", " blue."),
        ("", "blue."),
        ("a:\n", "b<|im_end|>"),
        ("<|im_start|>user\nHi", "\nA"),
    ]
    for _ in range(30):
        prompt, completion = ("".join(f" {chance.choice(WORDS)}" for _ in range(3)) for _ in range(2))
        pairs.append((prompt.rstrip(), completion))
    for prompt, completion in pairs:
        found = ids_and_labels({"prompt": prompt, "completion": completion})
        assert found == trl_plain(prompt, completion), (prompt, completion)


def test_a_conversational_completion_is_what_trl_makes_but_for_what_nobody_generates() -> None:
    prompt = [{"role": "user", "content": "What color is the sky?"}]
    completion = [{"role": "assistant", "content": "It is blue."}]
    for asked in (prompt, [{"role": "system", "content": "s"}, *prompt, *completion, *prompt]):
        found = ids_and_labels({"prompt": asked, "completion": completion})
        ids = TOKENIZER.apply_chat_template([*asked, *completion], return_dict=True)["input_ids"]
        start = len(
            TOKENIZER.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
        )
        of_trl = masked(ids, [0] * start + [1] * (len(ids) - start))
        assert TOKENIZER.decode(ids[-1:]) == "\n" and ids[-2] == EOS  # what follows the turn's end token
        assert found == (ids, [*of_trl[:-1], -100])
    whole = {"messages": [*prompt, *completion]}
    assert ids_and_labels({"prompt": prompt, "completion": completion}) == ids_and_labels(whole)


def test_alpaca_is_a_conversation_as_llama_factory_has_it() -> None:
    def said(*turns: str) -> tuple[list[int], list[int]]:
        system, *others = turns
        messages = [{"role": "system", "content": system}] if system else []
        roles = ("user", "assistant") * len(others)
        messages += [{"role": role, "content": text} for role, text in zip(roles, others, strict=False)]
        return ids_and_labels({"messages": messages})

    record = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    assert ids_and_labels(record) == said("", "Add.\n1 and 2", "3")
    assert ids_and_labels({**record, "input": ""}) == said("", "Add.", "3")
    whole = {**record, "system": "Be brief.", "history": [["Hi", "Yes?"], ["a", "b"]]}
    found = ids_and_labels(whole)
    assert found == said("Be brief.", "Hi", "Yes?", "a", "b", "Add.\n1 and 2", "3")
    learnt = TOKENIZER.decode([label for label in found[1] if label != -100])
    assert learnt == f"Yes?{END}b{END}3{END}"


def test_tokens_are_taken_as_they_are() -> None:
    ids = tokens("It is. What?")
    size = len(ids)
    half = [0] * 2 + [1] * (size - 2)
    tail = [0] * (size - 1) + [1]
    assert ids_and_labels({"input_ids": ids}) == (ids, ids)
    labels = masked(ids, half)
    harmless = {"attention_mask": [1] * size, "position_ids": list(range(size))}
    assert ids_and_labels({"input_ids": ids, "labels": labels, **harmless}) == (ids, labels)
    assert ids_and_labels({"input_ids": ids, "completion_mask": half}) == (ids, labels)
    both = {"input_ids": ids, "completion_mask": half, "assistant_masks": tail}
    assert ids_and_labels(both) == (ids, masked(ids, tail))
    assert ids_and_labels({"input_ids": ids, "labels": labels, "assistant_masks": tail})[1] == masked(
        ids, tail
    )


IDS = {"input_ids": [5, 6, 7]}
USER, ANSWER = {"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"instruction": "a", "ouput": "b"}, r"nearest format is alpaca .*`output` \(is 'ouput' meant"),
        ({"promt": "a", "completion": "b"}, r"prompt_completion .*`prompt` \(is 'promt' meant"),
        ({"prompt": "a"}, "nearest format is prompt_completion .*`completion` is missing"),
        ({"question": "a", "answer": "b"}, r"nearest format is query_response .*`response` \(is 'answer' m"),
        ({"prompt": "a", "response": "b"}, "unknown key 'prompt'.*did you mean 'query'"),
        ({"instruction": "a", "response": "b"}, "unknown key 'instruction'.*did you mean 'query'"),
        ({"title": "a", "year": 3}, "it has 'title'.*, 'year'.*; formats are messages"),
        ({"message": [USER, ANSWER]}, r"nearest format is messages .*is 'message' meant"),
        ({"content": "a book"}, r"has 'content'.*nearest format is text .*`text` \(is 'content' meant"),
        ({"text": "a", "messages": [USER, ANSWER]}, r"of messages \(`messages`\) and of text .*data.format"),
        ({"text": "a", "title": "b"}, "unknown key 'title'.*known are text"),
        ({"text": ["a"]}, "text is a string"),
        ({"text": " \n"}, "text is empty"),
        ({"text": "a<|im_end|>b"}, r"has '<\|im_end\|>', which the tokenizer reads as a special token"),
        ({"text": "a<|im_start|>b"}, r"has '<\|im_start\|>'"),
        ({"prompt": "The sky is ", "completion": "blue."}, "one token, ' b.*end the prompt without white"),
        ({"prompt": "a", "completion": ""}, "completion is empty"),
        ({"prompt": "a", "completion": [ANSWER]}, "two strings or two lists"),
        ({"prompt": [USER], "completion": [USER]}, "nothing to train on"),
        ({"prompt": [USER, {**ANSWER, "train": True}], "completion": [ANSWER]}, r"prompt\[1\].train is True"),
        ({"prompt": [], "completion": [ANSWER]}, "prompt is a list of at least one turn"),
        ({"prompt": "a", "completion": "b", "label": True}, "preference data.*does not support"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preference data"),
        ({"instruction": "a", "output": "b", "kto_tag": True}, "preference data"),
        ({"instruction": "a", "output": ""}, "without text"),
        ({"instruction": ["a"], "output": "b"}, "instruction is a string"),
        ({**IDS, "labels": [-100, 6]}, "labels has 2 entries, input_ids 3"),
        ({**IDS, "labels": [6, 7, -100]}, r"labels\[0\] is 6, but input_ids\[0\] is 5.*shifted by one"),
        ({**IDS, "labels": [-100, 9, 7]}, r"labels\[1\] is 9, but input_ids\[1\] is 6.*no loss$"),
        ({**IDS, "labels": [5, -100, -100]}, "no token after the first has a label"),
        ({**IDS, "attention_mask": [1, 1, 0]}, r"attention_mask\[2\] is 0.*leave the padding out"),
        ({**IDS, "position_ids": [0, 1, 0]}, r"position_ids\[2\] is 0, not 2.*several"),
        ({**IDS, "position_ids": [1, 2, 3]}, r"position_ids\[0\] is 1, not 0; positions are counted"),
        ({**IDS, "completion_mask": [0, 2, 1]}, r"completion_mask\[1\] is 2; valid are 0, 1"),
        ({"input_ids": [5, 10**6]}, "is 1000000, but the model has tokens 0 to 399"),
        ({"input_ids": [5, True]}, r"input_ids\[1\] is an integer"),
        ({"input_ids": [[5, 6]]}, "one record for each sequence"),
        ({"input_ids": []}, "input_ids is empty"),
        ({"input_ids": "5 6"}, "list of integers"),
        ({**IDS, "pixel_values": [1]}, "unknown key 'pixel_values'"),
    ],
)  # fmt: skip
def test_near_misses_say_what_is_missing(record: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as error:
        encoder().encode(record)
    assert len(str(error.value)) < 800


def test_a_format_may_be_named() -> None:
    record = {"text": "a", "instruction": "b", "output": "c"}
    alpaca = ids_and_labels({"instruction": "b", "output": "c"})
    with pytest.raises(ValueError, match="name one format as"):
        ids_and_labels(record)
    assert ids_and_labels(record, ignore_keys=["text"]) == alpaca
    assert ids_and_labels(record, ignore_keys=["text"], format="alpaca") == alpaca
    with pytest.raises(ValueError, match="unknown key 'text'"):
        ids_and_labels(record, format="alpaca")
    with pytest.raises(ValueError, match=r"not of the format tokens .*`input_ids` is missing"):
        ids_and_labels(record, format="tokens")
    with pytest.raises(ValueError, match=r"'alpca' is no format.*did you mean 'alpaca'"):
        encoder(format="alpca")
    with pytest.raises(ValueError, match="ignore_keys has labels, which records of the format tokens use"):
        ids_and_labels({"input_ids": [5, 6], "labels": [-100, 6]}, ignore_keys=["labels"])
    talk = {"messages": [USER, ANSWER]}
    found = ids_and_labels(
        {**talk, "labels": 3, "input": "x", "prompt": "y"}, ignore_keys=["labels", "input", "prompt"]
    )
    assert found == ids_and_labels(talk)
    with pytest.raises(ValueError, match="ignore_keys has tools"):
        check_ignored(["tools"])


def test_the_table_has_each_format_once() -> None:
    needs = [format_.needs for format_ in FORMATS.values()]
    assert len(set(needs)) == len(needs) == 7
    assert parse_record({"text": "a"}, name="text") == parse_record({"text": "a"})


def test_plain_text_needs_no_chat_template_but_an_end_token() -> None:
    _, tokenizer = tiny_training_model("llama")
    tokenizer.chat_template = None
    one = SampleEncoder(tokenizer, MODEL.config, MediaFiles(Path(".")))
    assert one.encode({"text": "It is."})["input_ids"].tolist() == [*tokens("It is."), EOS]
    with pytest.raises(ValueError, match="no chat template"):
        one.encode({"messages": [USER, ANSWER]})
    tokenizer.eos_token = None
    one = SampleEncoder(tokenizer, MODEL.config, MediaFiles(Path(".")))
    with pytest.raises(ValueError, match=r"no eos_token; name .*data.end_of_document"):
        one.encode({"text": "It is."})
    with pytest.raises(ValueError, match="end_of_document='</s>' is no token"):
        encoder(end_of_document="</s>")


def test_a_model_that_sees_takes_plain_text_without_placeholders() -> None:
    model, processor = tiny_training_model("qwen3_vl")
    one = SampleEncoder(processor, model.config, MediaFiles(Path(".")))
    pad = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert np.array_equal(one.encode({"text": "It is."})["labels"], [*tokens("It is."), EOS])
    for record in ({"input_ids": [5, pad, 6]}, {"prompt": "a <|image_pad|>", "completion": " b"}):
        with pytest.raises(ValueError, match=r"image_pad.*stands for media"):
            one.encode(record)
