"""Placeholders of media in a rendered conversation, and what the stock processors write in their place."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..chat.spans import Span
from ..records.parts import MediaKind

KINDS: tuple[MediaKind, ...] = ("image", "video", "audio")


class Placeholder(NamedTuple):
    """The one token that stands for a media item before it is expanded."""

    kind: MediaKind
    start: int
    stop: int


class Expanded(NamedTuple):
    """A text with its placeholders written out."""

    text: str
    old: list[Span]
    """What was replaced, in the text before."""
    new: list[Span]
    """What it was replaced by."""

    def moved(self, span: Span) -> Span:
        """A span of the text before, in this one; its ends lie in no placeholder."""
        start, stop = (self._moved(place) for place in span)
        return start, stop

    def _moved(self, place: int) -> int:
        number = bisect_right(self.old, place, key=lambda replaced: replaced[1])
        if number < len(self.old) and self.old[number][0] < place:
            raise ValueError(
                "the chat template begins or ends a turn within the placeholder of an image, video or clip"
            )
        return place + (self.new[number - 1][1] - self.old[number - 1][1] if number else 0)


class Placeholders:
    """How a processor's placeholders look."""

    def __init__(self, processor: Any) -> None:
        self.token: dict[MediaKind, str] = {
            kind: getattr(processor, f"{kind}_token")
            for kind in KINDS
            if getattr(processor, f"{kind}_token", None) is not None
        }
        self.vision_start = _first(processor, "vision_start_token", "vision_bos_token")
        self.vision_end = _first(processor, "vision_end_token", "vision_eos_token")
        self.audio_start = _first(processor, "audio_bos_token")
        self.audio_end = _first(processor, "audio_eos_token")
        # Newer releases of transformers replace the placeholder alone, so that a video of Qwen3-VL keeps the
        # brackets of the template around those of its frames; the older ones replace the brackets with it.
        self.keeps_brackets = hasattr(processor, "get_text_with_replacements")
        self._pattern = re.compile("|".join(map(re.escape, self.token.values())) or r"(?!)")
        self._kinds = {token: kind for kind, token in self.token.items()}

    def find(self, text: str, kinds: Sequence[MediaKind]) -> list[Placeholder]:
        """The placeholders of a rendered conversation, which are those of its media, in order."""
        found = [Placeholder(self._kinds[m[0]], *m.span()) for m in self._pattern.finditer(text)]
        if [place.kind for place in found] != list(kinds):
            raise ValueError(
                f"the conversation has {_listed(kinds)}, but the chat template writes placeholders for "
                f"{_listed([place.kind for place in found])}"
            )
        return found

    def around(self, text: str, place: Placeholder) -> Span:
        """A placeholder of vision with the brackets around it, itself where there are none."""
        start, stop = place.start - len(self.vision_start), place.stop + len(self.vision_end)
        if (
            start < 0
            or text[start:stop] != self.vision_start + text[place.start : place.stop] + self.vision_end
        ):
            return place.start, place.stop
        return start, stop

    def frames(self, timestamps: Sequence[float], tokens_per_frame: int) -> str:
        """A video of Qwen3-VL: each step of its grid apart, after its time."""
        frame = self.vision_start + self.token["video"] * tokens_per_frame + self.vision_end
        return "".join(f"<{seconds:.1f} seconds>{frame}" for seconds in timestamps)

    def video_with_sound(self, times: NDArray[np.float64], tokens_per_frame: int, num_heard: int) -> str:
        """A video of Omni and its sound, ordered by time, the frame first where they meet.

        Args:
            times: of each step of the video's grid, counted in audio tokens.
            tokens_per_frame: of a step.
            num_heard: tokens of the sound.
        """
        all_times = np.concatenate([times.repeat(tokens_per_frame), np.arange(num_heard)])
        is_heard = np.argsort(all_times, kind="stable") >= len(times) * tokens_per_frame
        inner = "".join(np.where(is_heard, self.token["audio"], self.token["video"]).tolist())
        return f"{self.vision_start}{self.audio_start}{inner}{self.audio_end}{self.vision_end}"

    @staticmethod
    def expand(text: str, replacements: Sequence[tuple[Span, str]]) -> Expanded:
        """Replace spans, which are in order."""
        pieces, old, new = [], [], []
        done, length = 0, 0
        for (start, stop), replacement in replacements:
            pieces += [text[done:start], replacement]
            length += start - done
            old.append((start, stop))
            new.append((length, length + len(replacement)))
            done, length = stop, length + len(replacement)
        return Expanded("".join([*pieces, text[done:]]), old, new)


def _first(processor: Any, *names: str) -> str:
    return next((getattr(processor, name) for name in names if getattr(processor, name, None)), "")


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(kinds) or "nothing"
