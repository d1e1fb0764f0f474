"""Texts and prompts given by file, and passages cut from texts. Knows no tokens."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from training.text_filters import whole_sentences

Message = dict[str, str]

_ROLES: Final = ("system", "user", "assistant")


class InputError(ValueError):
    """A file of documents or prompts is not what the command reads; the text says where."""


def read_documents(path: Path) -> list[str]:
    """The texts of a file: JSONL with `text` in each object, or else one text a line.

    Raises InputError naming file and line, OSError where the file cannot be read.
    """
    texts = []
    for number, line in _lines(path):
        if path.suffix != ".jsonl":
            texts.append(line)
            continue
        text = _object(path, number, line).get("text")
        if not isinstance(text, str) or not text.strip():
            raise InputError(f"{path}: line {number}: text must be a non-empty string")
        texts.append(text.strip())
    return texts


def read_prompts(path: Path) -> list[list[Message]]:
    """The chats of a JSONL file: `prompt`, or `messages` whose last is the user's.

    Raises InputError naming file and line, OSError where the file cannot be read.
    """
    chats = []
    for number, line in _lines(path):
        record = _object(path, number, line)
        messages = record.get("messages", [{"role": "user", "content": record.get("prompt")}])
        chats.append(_chat(messages, f"{path}: line {number}"))
    return chats


def cut(text: str, size: int, rng: random.Random) -> str:
    """About `size` characters of whole sentences from a random place of a text, or all of it."""
    if len(text) <= size:
        return text
    start = rng.randrange(len(text) - size + 1)
    if start:
        # From the next sentence on, where one begins soon enough.
        breaks = [found for mark in (". ", "\n") if (found := text.find(mark, start)) >= 0]
        start = min(breaks) + 1 if breaks and min(breaks) < start + size // 2 else 0
    piece = text[start : start + size].strip()
    return whole_sentences(piece) or piece


def passages(texts: Sequence[str], size: int, rng: random.Random) -> str:
    """A piece of each text, numbered or not, of about `size` characters together."""
    pieces = [cut(text, size // len(texts), rng) for text in texts]
    style = rng.choice(("[{}] {}", "Passage {}: {}", "{}. {}", "Document {}:\n{}", "{1}"))
    numbered = [style.format(number, piece) for number, piece in enumerate(pieces, start=1)]
    return rng.choice(("\n\n", "\n")).join(numbered)


def _lines(path: Path) -> list[tuple[int, str]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(f"{path}: line {number}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise InputError(f"{path}: line {number}: must be an object")
    return record


def _chat(messages: object, where: str) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise InputError(f"{where}: messages must be a non-empty list")
    chat = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(content, str) or not content.strip():
            raise InputError(
                f"{where}: a message needs a role ({', '.join(_ROLES)}) and a text as content; "
                "an object without messages needs a text as prompt"
            )
        chat.append({"role": role, "content": content})
    if chat[-1]["role"] != "user":
        raise InputError(f"{where}: the last message must be the user's")
    return chat
