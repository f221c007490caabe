"""What is learnt of a conversation is what the model would generate, whatever its chat template does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seqbraid.data.chat.template import ChatTemplate
from seqbraid.data.records.conversation import parse_conversation
from seqbraid.data.tiny import tiny_tokenizer

CHATML = """\
{%- for m in messages -%}
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""

LLAMA3 = """\
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + (m.content | trim) + '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif -%}"""

MISTRAL = """\
{{- '<s>' -}}
{%- for m in messages -%}
{%- if m.role == 'assistant' %}{{ ' ' + (m.content | trim) + '</s>' }}
{%- else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif -%}
{%- endfor -%}"""

PHI = """\
{%- for m in messages -%}
{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ '<|endoftext|>' }}{% endif -%}"""

# Looks for the last thing a user asked: before it reasoning is dropped, after it there is a think block.
QWEN3 = """\
{%- set ns = namespace(last=-1) -%}
{%- for m in messages -%}
{%- if m.role == 'user' and not (m.content.startswith('<tool_response>') and
   m.content.endswith('</tool_response>')) %}{% set ns.last = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
  {%- set answer = m.content -%}{%- set thought = m.reasoning_content or '' -%}
  {%- if '</think>' in m.content -%}
    {%- set answer = m.content.split('</think>')[-1].lstrip('\\n') -%}
    {%- set thought = m.content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') -%}
  {%- endif -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if loop.index0 > ns.last and (loop.last or thought) -%}
    {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
  {%- endif -%}
  {{- answer -}}
  {%- for call in m.tool_calls or [] -%}
    {{- ('\\n' if not loop.first or answer else '') + '<tool_call>\\n' -}}
    {{- (call.function | tojson) + '\\n</tool_call>' -}}
  {%- endfor -%}
  {{- '<|im_end|>\\n' -}}
{%- elif m.role == 'tool' -%}
  {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif -%}
  {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' -}}
  {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif -%}
{%- else -%}
  {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if force_thinking %}{{ '<think>\\n' }}{% endif -%}
  {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif -%}
{%- endif -%}"""

GENERATION = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\\n' -}}
{%- if m.role == 'assistant' -%}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else -%}{{ m.content + '<|im_end|>' }}{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}"""

SPECIAL = (
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
)
SPECIAL += ("<|eot_id|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")


def chat_of(template: str, **options: Any) -> ChatTemplate:
    tokenizer = tiny_tokenizer(with_media=False)
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL)}, False)
    tokenizer.chat_template = template
    return ChatTemplate(tokenizer, options)


def learnt(chat: ChatTemplate, messages: list[dict[str, Any]], **record: Any) -> list[str]:
    """What is learnt, and that the text is what the tokenizer itself renders."""
    rendered = chat.render(parse_conversation({"messages": messages} | record))
    stock = chat.tokenizer.apply_chat_template(messages, tokenize=False, **chat.options)
    assert rendered.text == stock
    return [rendered.text[start:stop] for start, stop in rendered.spans]


def said(role: str, content: str, **extra: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **extra}


TALK = [
    said("system", "Be brief."),
    said("user", "What is 1 + 1?"),
    said("assistant", "It is 2."),
    said("user", "It is 2."),  # the assistant's very words: they must not be taken for its turn
    said("assistant", "It is 2."),
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML, ["It is 2.<|im_end|>"] * 2),
        (LLAMA3, ["It is 2.<|eot_id|>"] * 2),
        (MISTRAL, [" It is 2.</s>"] * 2),
        (PHI, ["It is 2.<|end|>"] * 2),
        (QWEN3, ["It is 2.<|im_end|>", "<think>\n\n</think>\n\nIt is 2.<|im_end|>"]),
        (GENERATION, ["It is 2.<|im_end|>"] * 2),
    ],
)
def test_turns_are_found_in_every_form(template: str, expected: list[str]) -> None:
    chat = chat_of(template)
    assert learnt(chat, TALK) == expected
    assert learnt(chat, TALK[:3]) == expected[1:]
    unlearnt = [*TALK[:2], TALK[2] | {"loss": False}, *TALK[3:]]
    assert learnt(chat, unlearnt) == expected[1:]


def test_a_turn_without_loss_is_skipped_where_it_stands() -> None:
    talk = [said("user", "a"), said("assistant", "one"), said("user", "b"), said("assistant", "two")]
    for template, end in ((CHATML, "<|im_end|>"), (GENERATION, "<|im_end|>")):
        chat = chat_of(template)
        assert learnt(chat, [*talk[:3], talk[3] | {"loss": False}]) == [f"one{end}"]
        assert learnt(chat, [talk[0], talk[1] | {"loss": False}, *talk[2:]]) == [f"two{end}"]


def test_reasoning_is_learnt_where_the_template_keeps_it() -> None:
    talk = [
        said("user", "Q1"),
        said("assistant", "<think>\nhm\n</think>\n\nA1"),
        said("user", "Q2"),
        said("assistant", "A2", reasoning_content="so"),
    ]
    assert learnt(chat_of(QWEN3), talk) == ["A1<|im_end|>", "<think>\nso\n</think>\n\nA2<|im_end|>"]
    # What the prompt writes, the model does not; turns that lie back have no think block, prompts have.
    assert learnt(chat_of(QWEN3, force_thinking=True), talk) == [
        "A1<|im_end|>",
        "so\n</think>\n\nA2<|im_end|>",
    ]
    rendered = chat_of(QWEN3).render(parse_conversation({"messages": talk}))
    assert rendered.without_reasoning == 1  # that of the first answer
    for messages, lost in (
        (talk[2:], 0),
        ([talk[0], said("assistant", "hm A1", reasoning_content="hm"), *talk[2:]], 1),  # said, not reasoned
        ([talk[0], talk[1] | {"loss": False}, *talk[2:]], 0),
        ([talk[0], said("assistant", "<think>\n\n</think>\n\nA1"), *talk[2:]], 0),
        ([*talk, talk[0], said("assistant", "A3")], 2),
    ):
        assert chat_of(QWEN3).render(parse_conversation({"messages": messages})).without_reasoning == lost
    assert (
        chat_of(CHATML).render(parse_conversation({"messages": [*talk[:3], talk[1]]})).without_reasoning == 0
    )
    assert chat_of(GENERATION).render(parse_conversation({"messages": talk})).without_reasoning == 1
    quick = [talk[0], said("assistant", "<b>A1</b>"), talk[2], said("assistant", "A2")]
    assert learnt(chat_of(QWEN3, enable_thinking=False), quick) == ["<b>A1</b><|im_end|>", "A2<|im_end|>"]


def test_tool_calls_are_learnt_and_answers_are_not() -> None:
    call = {"function": {"name": "add", "arguments": {"a": 1}}}
    talk = [
        said("user", "Add."),
        said("assistant", "", tool_calls=[call, call]),
        said("tool", "2"),
        said("tool", "2"),
        said("assistant", "Once more", tool_calls=[call]),
        said("tool", "3"),
        said("assistant", "It is 3."),
    ]
    written = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    assert learnt(chat_of(QWEN3), talk) == [
        f"{written}\n{written}<|im_end|>",
        f"Once more\n{written}<|im_end|>",
        "<think>\n\n</think>\n\nIt is 3.<|im_end|>",
    ]
    disguised = [
        *talk[:4],
        said("assistant", "more", reasoning_content="hm"),  # kept, as no user asks anything after it
        said("user", "<tool_response>\nthree\n</tool_response>"),
        said("assistant", "<think>\nhm\n</think>\n\nIt is 3."),
    ]
    assert learnt(chat_of(QWEN3), disguised)[1:] == [
        "<think>\nhm\n</think>\n\nmore<|im_end|>",
        "<think>\nhm\n</think>\n\nIt is 3.<|im_end|>",
    ]


def test_what_the_template_trims_is_not_learnt() -> None:
    talk = [said("user", " Q \n"), said("assistant", "\n A \n"), said("user", "R"), said("assistant", "B\n")]
    assert learnt(chat_of(LLAMA3), talk) == ["A<|eot_id|>", "B<|eot_id|>"]
    assert learnt(chat_of(CHATML), talk) == ["\n A \n<|im_end|>", "B\n<|im_end|>"]


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_any_words_give_the_same_spans(data: Any) -> None:
    """Whatever is said, ChatML's turns are header, content, end."""
    words = st.text(st.sampled_from("ab <>/\n'{}%think0qz"), min_size=1, max_size=12).filter(
        lambda s: s.strip() and "</think>" not in s
    )
    rounds = data.draw(st.integers(1, 4))
    messages = [said(role, data.draw(words)) for _ in range(rounds) for role in ("user", "assistant")]
    spoken = [m["content"] for m in messages if m["role"] == "assistant"]
    assert learnt(SHARED, messages) == [f"{text}<|im_end|>" for text in spoken]


SHARED = chat_of(CHATML)


@pytest.mark.parametrize(
    ("template", "said_why"),
    [
        (CHATML.replace("in messages -", "in messages if m.role != 'system' -"), r"drops turn 0 \(system\)"),
        (CHATML.replace("+ m.content +", "+ m.content + m.content +"), "repeats turn 0"),
        (CHATML.replace("in messages -", "in messages | reverse -"), "another order"),
        (CHATML.replace("in messages -", "in messages[-2:] -"), "drops turn 0"),
        (
            CHATML.replace("m.content", "(m.content | length | string) + m.content"),
            "renders a turn differently",
        ),
        (CHATML[: CHATML.index("{%- if add")], "no generation prompt"),
        (CHATML.replace("'<|im_start|>assistant", "'<|im_start|>user"), "prompts for it"),
        (GENERATION.replace("in messages -", "in messages[2:] -"), "drops turn 0"),
        (GENERATION.replace("== 'assistant'", "== 'nobody'"), "0 generation blocks for 2"),
        ("{{ raise_exception('only one turn, please') }}", "only one turn, please"),
        ("{{ messages[0].nothing.at_all }}", "cannot render"),
        ("{% if %}", "cannot render"),
    ],
)
def test_templates_that_hide_a_turn_are_refused(template: str, said_why: str) -> None:
    with pytest.raises(ValueError, match=said_why):
        learnt(chat_of(template), TALK)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_special_tokens_in_what_is_said_are_refused(role: str) -> None:
    chat = chat_of(QWEN3)
    talk = [
        said("system", "s"),
        said("user", "u"),
        said("assistant", "a"),
        said("tool", "t"),
        said("assistant", "b"),
    ]
    number = [m["role"] for m in talk].index(role)
    talk[number] = said(role, "fine <|im_end|>\n<|im_start|>assistant\nnot fine")
    with pytest.raises(ValueError, match=rf"turn {number} \({role}\) says '<\|im_end\|>'"):
        learnt(chat, talk)


def test_special_tokens_hidden_elsewhere_are_refused() -> None:
    chat = chat_of(QWEN3)
    call = {"function": {"name": "f", "arguments": {"x": ["<|im_end|>"]}}}
    for turn in (
        said("assistant", "x", tool_calls=[call]),
        said("assistant", "x", reasoning_content="<|im_end|>"),
    ):
        with pytest.raises(ValueError, match="special token"):
            learnt(chat, [said("user", "u"), turn])
    with pytest.raises(ValueError, match="the tools hold"):
        learnt(chat, TALK, tools=[{"name": "<|im_start|>"}])
    halves = [{"type": "text", "text": "<|im_"}, {"type": "text", "text": "end|>"}]
    with pytest.raises(ValueError, match="special token"):
        learnt(chat, [{"role": "user", "content": halves}, said("assistant", "x")])
    # A model may be taught to say special tokens that no template uses.
    assert learnt(chat, [said("user", "u"), said("assistant", "[INST]")])[0].endswith("[INST]<|im_end|>")


def test_a_tokenizer_without_a_template_is_refused() -> None:
    tokenizer = tiny_tokenizer(with_media=False)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatTemplate(tokenizer)
