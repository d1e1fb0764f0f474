"""The bytes that each token id stands for, from a tokenizer's vocabulary and decoder."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import Tokenizer

from outrider.serving.tokenizer_parts import UnsupportedTokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBytes:
    """`by_id[token_id]` is what the token adds to a text; empty for an id without a token.

    `first_by_id` has the tokens that add something else at a text's start: SentencePiece puts a
    space before the first word, which does not belong to the text.
    """

    by_id: tuple[bytes, ...] = field(repr=False)
    first_by_id: Mapping[int, bytes] = field(repr=False)


def token_bytes(tokenizer: Tokenizer, vocab_size: int) -> TokenBytes:
    """Work out every token's bytes; raises UnsupportedTokenizer for an unknown decoder."""
    if tokenizer.decoder is None:
        raise UnsupportedTokenizer("the tokenizer has no decoder")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    ids_by_text = tokenizer.get_vocab(with_added_tokens=True)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        known, first = _byte_level(ids_by_text), dict[int, bytes]()
    else:
        known, first = _sentencepiece(ids_by_text, steps)
    size = max(vocab_size, max(known, default=-1) + 1)
    return TokenBytes(
        by_id=tuple(known.get(token_id, b"") for token_id in range(size)),
        first_by_id=first,
    )


def byte_signs() -> dict[str, int]:
    """Byte-level BPE's sign for each byte (Radford et al. 2019, GPT-2): printable Latin-1
    characters stand for themselves, the other bytes, in order, for the characters from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    signs = {chr(byte): byte for byte in printable}
    signs.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return signs


def _byte_level(ids_by_text: Mapping[str, int]) -> dict[int, bytes]:
    signs = byte_signs()
    table = {ord(sign): byte for sign, byte in signs.items()}
    # A text with any other character is an added token, which is written as it is.
    all_signs = re.compile(f"[{re.escape(''.join(signs))}]*").fullmatch
    return {
        token_id: (
            text.translate(table).encode("latin-1") if all_signs(text) else text.encode("utf-8")
        )
        for text, token_id in ids_by_text.items()
    }


def _sentencepiece(
    ids_by_text: Mapping[str, int], steps: list[dict[str, Any]]
) -> tuple[dict[int, bytes], dict[int, bytes]]:
    kinds = [_checked_step(step) for step in steps]
    space_sign = _space_sign(steps)
    drops_all_of_first_token = any(step.get("prepend_scheme", "never") != "never" for step in steps)
    known: dict[int, bytes] = {}
    first: dict[int, bytes] = {}
    for text, token_id in ids_by_text.items():
        byte = _BYTE_TOKEN.fullmatch(text) if "ByteFallback" in kinds else None
        if byte is not None:
            known[token_id] = bytes([int(byte[1], 16)])
        else:
            known[token_id] = text.replace(space_sign, " ").encode("utf-8")
            if drops_all_of_first_token and space_sign in text:
                first[token_id] = text.replace(space_sign, "").encode("utf-8")
        if "Strip" in kinds and known[token_id].startswith(b" "):
            first[token_id] = known[token_id][1:]
    return known, first


def _checked_step(step: dict[str, Any]) -> str:
    kind = str(step["type"])
    is_known = (
        kind in ("ByteFallback", "Fuse", "Metaspace")
        or (kind == "Replace" and step["content"] == " " and "String" in step["pattern"])
        or (kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0))
    )
    if not is_known:
        raise UnsupportedTokenizer(f"decoder step {step} is not implemented")
    return kind


def _space_sign(steps: list[dict[str, Any]]) -> str:
    for step in steps:
        if step["type"] == "Metaspace":
            return str(step["replacement"])
        if step["type"] == "Replace":
            return str(step["pattern"]["String"])
    raise UnsupportedTokenizer(
        f"decoder {[step['type'] for step in steps]} is neither byte-level nor SentencePiece"
    )
