"""Special tokens: texts that become tokens with a meaning of their own."""

from __future__ import annotations

import re
from typing import Any


def special_pattern(tokenizer: Any) -> re.Pattern[str]:
    """Finds any of a tokenizer's special tokens, the longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    found = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
    longest_first = sorted(found, key=lambda token: (-len(token), token))
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
