"""Which of the target's own texts are worth keeping: no loops, no fragments, no garbage."""

import re
from collections.abc import Sequence
from typing import Final

# Of texts of at least this many tokens, a smaller share of distinct runs of four is a loop.
_LOOP_RUN: Final = 4
_LOOP_TOKENS: Final = 48
_LOOP_SHARE: Final = 0.4
_SENTENCE_END: Final = re.compile(r"[.!?\"”)\]`](?=\s|$)|\n")
_MIN_PROMPT: Final = 8
_MAX_PROMPT: Final = 2000
_LETTERS: Final = 0.4
_RESERVED: Final = ("<|", "|>", "\ufffd")


def is_loop(token_ids: Sequence[int]) -> bool:
    """Whether a text repeats itself so much that most of it is foreseeable."""
    count = len(token_ids) - _LOOP_RUN + 1
    if count < _LOOP_TOKENS:
        return False
    runs = {tuple(token_ids[start : start + _LOOP_RUN]) for start in range(count)}
    return len(runs) < _LOOP_SHARE * count


def whole_sentences(text: str) -> str:
    """The text up to its last sentence's end; empty where no sentence ends."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]].rstrip() if ends else ""


def is_prompt(text: str) -> bool:
    """Whether a text can be what a person wrote: two words or more, most of it letters."""
    if not _MIN_PROMPT <= len(text) <= _MAX_PROMPT or len(text.split()) < 2:
        return False
    if any(mark in text for mark in _RESERVED):
        return False
    kept = sum(char.isalpha() or char.isspace() for char in text)
    return kept >= _LETTERS * len(text)
