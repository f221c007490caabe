"""A conversation through the model's own chat template, and the label mask over its characters.

It covers what the model would generate: from the end of the generation prompt to the token that ends the
turn, included, of the assistant turns with loss.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

from transformers.utils.chat_template_utils import render_jinja_template

from ..records.conversation import Conversation, Turn
from .spans import MarkedConversation, Message, Span, all_texts
from .special import special_pattern

_REASONING, _END_OF_REASONING = "<think>", "</think>"
"""How reasoning stands in what the assistant says, where it has no key of its own."""

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")


class Rendered(NamedTuple):
    """A conversation as text, before placeholders of media are expanded."""

    text: str
    spans: list[Span]
    """Characters with labels, one span for each turn with loss."""
    without_reasoning: int = 0
    """Turns with loss that have reasoning in the record, and none in the text."""


class ChatTemplate:
    """The chat template of a processor or tokenizer."""

    def __init__(self, processor: Any, options: Mapping[str, Any] | None = None) -> None:
        self.processor = processor
        self.tokenizer = getattr(processor, "tokenizer", processor)
        self.options = dict(options or {})
        """Handed to the template, such as `enable_thinking`."""
        template = getattr(processor, "chat_template", None) or self.tokenizer.chat_template
        if isinstance(template, Mapping):
            template = template.get("default")
        if not isinstance(template, str):
            raise ValueError(
                f"{type(processor).__name__} has no chat template, so conversations cannot be rendered; "
                "set tokenizer.chat_template"
            )
        self.template = template

    def render(self, conversation: Conversation) -> Rendered:
        """The text of a conversation and which of it has labels."""
        self._check_special(conversation)
        messages = [self._message(turn) for turn in conversation.turns]
        tools = [dict(tool) for tool in conversation.tools] or None
        marked = MarkedConversation(
            messages, lambda some, prompt: self._rendered(some, tools, prompt)[0], self.special_pattern
        )
        labelled = [(number, turn) for number, turn in enumerate(conversation.turns) if turn.loss]
        if _GENERATION.search(self.template):
            spans = self._tagged(messages, tools, conversation)
        else:
            spans = [marked.generated(number) for number, _ in labelled]
        texts = (marked.plain[start:stop] for start, stop in spans)
        lost = sum(loses_reasoning(turn, text) for (_, turn), text in zip(labelled, texts, strict=True))
        return Rendered(marked.plain, spans, lost)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Finds any of the special tokens."""
        return special_pattern(self.tokenizer)

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template writes the arguments of a call as they are, so that they must be JSON already;
        others make JSON of an object, and would write JSON in a string as one more string.
        """
        call = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": {"qza": 1}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        messages = [{"role": "user", "content": "a"}, said]
        texts = []
        for spelled in (False, True):
            said["tool_calls"] = [_spelled(call) if spelled else call]
            try:
                texts.append(self._rendered(messages, None)[0])
            except ValueError:
                texts.append("")
        as_object, as_text = texts
        is_json = "qza" in as_object and "'qza'" not in as_object  # else it is as Python writes it
        return not is_json and '"qza"' in as_text and '\\"qza' not in as_text

    def _message(self, turn: Turn) -> Message:
        message = _message(turn)
        if message.get("tool_calls") and self._wants_text:
            message["tool_calls"] = [_spelled(call) for call in message["tool_calls"]]
        return message

    def _rendered(
        self, messages: Sequence[Message], tools: Any, prompt: bool = False, spans: bool = False
    ) -> tuple[str, Any]:
        try:
            texts, indices = render_jinja_template(
                conversations=[[dict(message) for message in messages]],
                tools=tools,
                chat_template=self.template,
                add_generation_prompt=prompt,
                return_assistant_tokens_mask=spans,
                **{**self.tokenizer.special_tokens_map, **self.options},
            )
        except Exception as error:  # a template may fail in any way: it is a program of the checkpoint's
            raise ValueError(
                f"the chat template cannot render this conversation: {type(error).__name__}: {error}"
            ) from error
        return texts[0], indices[0] if spans else None

    def _tagged(self, messages: list[Message], tools: Any, conversation: Conversation) -> list[Span]:
        """By the template's own `{% generation %}` blocks."""
        _, spans = self._rendered(messages, tools, spans=True)
        spoken = [turn for turn in conversation.turns if turn.role == "assistant"]
        if len(spans) != len(spoken):
            raise ValueError(
                f"the chat template has {len(spans)} generation blocks for {len(spoken)} assistant turns; "
                "give it one for each"
            )
        return [(start, stop) for (start, stop), turn in zip(spans, spoken, strict=True) if turn.loss]

    def _check_special(self, conversation: Conversation) -> None:
        """Refuse texts that would become tokens of the template's or of media."""
        media = {getattr(self.processor, f"{kind}_token", None) for kind in ("image", "video", "audio")}
        own = {self.tokenizer.bos_token, self.tokenizer.eos_token, self.tokenizer.pad_token} | media
        for number, turn in enumerate(conversation.turns):
            for text in _joined(turn):
                for token in self.special_pattern.findall(text):
                    # What a model says may hold special tokens, such as those of boxes, but not a turn's end.
                    if turn.role != "assistant" or token in own or token in self.template:
                        raise ValueError(
                            f"turn {number} ({turn.role}) says {token!r}, which the tokenizer would read "
                            "as a special token; remove it or write it differently"
                        )
        for text in all_texts(conversation.tools):
            if found := self.special_pattern.search(text):
                raise ValueError(
                    f"the tools hold {found[0]!r}, which the tokenizer would read as a special token"
                )


def _spelled(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call whose arguments are JSON in a string."""
    inner = call.get("function", call)
    if not isinstance(inner.get("arguments"), Mapping):
        return call
    inner = {**inner, "arguments": json.dumps(inner["arguments"], ensure_ascii=False)}
    return {**call, "function": inner} if "function" in call else inner


def loses_reasoning(turn: Turn, text: str) -> bool:
    """Whether a turn has reasoning that its text lacks: beside what it answers, or in tags before that."""
    said = "".join(part for part in turn.parts if isinstance(part, str))
    before, tag, answer = said.rpartition(_END_OF_REASONING)
    reasoning = (turn.extra.get("reasoning_content") or "").strip()
    if tag:
        reasoning = reasoning or before.rpartition(_REASONING)[2].strip()
    if not reasoning:
        return False
    place = text.rfind(answer.strip()) if answer.strip() else -1
    return reasoning not in (text[:place] if place >= 0 else text)


def _joined(turn: Turn) -> Iterator[str]:
    """All that a turn says; texts that touch are one."""
    for is_text, parts in groupby(turn.parts, lambda part: isinstance(part, str)):
        if is_text:
            yield "".join(map(str, parts))
    yield from all_texts(turn.extra)


def _message(turn: Turn) -> Message:
    """As chat templates expect it: a string where there is but text, else a list of parts."""
    if all(isinstance(part, str) for part in turn.parts):
        content: Any = "".join(turn.parts)  # type: ignore[arg-type]
    else:
        content = [
            {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
            for part in turn.parts
        ]
    return {"role": turn.role, "content": content, **turn.extra}
