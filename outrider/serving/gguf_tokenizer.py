"""A tokenizer from a GGUF file's metadata: byte-level BPE or SentencePiece, by its own word."""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Final

from tokenizers import AddedToken, Tokenizer, decoders, models

from outrider.serving.gguf_metadata import GGUFScalar, GGUFValue, read_gguf_metadata
from outrider.serving.pre_tokenizers import named_pre_tokenizer, nfc_normalizer
from outrider.serving.sentencepiece import sentencepiece_tokenizer
from outrider.serving.tokenizer_parts import TokenizerParts, UnsupportedTokenizer

_PREFIX: Final = "tokenizer.ggml."


class TokenType(IntEnum):
    """What a GGUF vocabulary says of each of its tokens."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_gguf_tokenizer(path: Path) -> TokenizerParts:
    """Build the tokenizer that a .gguf file describes.

    Raises CorruptGGUF, or UnsupportedTokenizer naming the key, the value and what is known.
    """
    metadata = read_gguf_metadata(path)
    kind = _text(metadata, "model")
    if kind not in ("gpt2", "llama"):
        raise UnsupportedTokenizer(
            f"{path}: tokenizer.ggml.model {kind!r} is not implemented; known: gpt2, llama"
        )
    tokens = _texts(metadata, "tokens")
    types = _token_types(metadata, len(tokens))
    if kind == "gpt2":
        name = _text(metadata, "pre", default="default")
        tokenizer = _byte_level_tokenizer(tokens, _texts(metadata, "merges"), name)
        adds_bos_by_habit = named_pre_tokenizer(name).adds_bos
        default_ids: dict[str, int] = {}
    else:
        tokenizer = sentencepiece_tokenizer(
            tokens,
            scores=_numbers(metadata, "scores", len(tokens)),
            mergeable=[token_type == TokenType.NORMAL for token_type in types],
            unknown_token_id=types.index(TokenType.UNKNOWN) if TokenType.UNKNOWN in types else None,
            adds_space_prefix=_flag(metadata, "add_space_prefix", default=True),
        )
        adds_bos_by_habit = True
        default_ids = {"bos_token_id": 1, "eos_token_id": 2}
    _add_tokens(tokenizer, tokens, types)
    ids = default_ids | _token_ids(metadata, len(tokens))
    return TokenizerParts(
        tokenizer=tokenizer,
        vocab_size=len(tokens),
        bos_token_id=ids.get("bos_token_id"),
        eos_token_ids=tuple(
            dict.fromkeys(
                ids[key] for key in ("eos_token_id", "eot_token_id", "eom_token_id") if key in ids
            )
        ),
        adds_bos=_flag(metadata, "add_bos_token", default=adds_bos_by_habit),
        special_tokens={role: tokens[ids[key]] for role, key in _ROLES.items() if key in ids},
        chat_template=_optional_text(metadata, "tokenizer.chat_template"),
    )


_ROLES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
    "sep_token": "seperator_token_id",
}


def _byte_level_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], pre_tokenizer_name: str
) -> Tokenizer:
    kind = named_pre_tokenizer(pre_tokenizer_name)
    # A merge is "left right"; neither side holds a space, which byte level writes as another sign.
    pairs: list[tuple[str, str]] = []
    for merge in merges:
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise UnsupportedTokenizer(f"tokenizer.ggml.merges has {merge!r}, which is no pair")
        pairs.append((left, right))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    missing = {part for pair in pairs for part in (*pair, "".join(pair)) if part not in vocabulary}
    if missing:
        raise UnsupportedTokenizer(
            f"tokenizer.ggml.merges uses {len(missing)} tokens that the vocabulary has not, "
            f"{min(missing)!r} among them"
        )
    tokenizer = Tokenizer(
        models.BPE(vocabulary, pairs, fuse_unk=False, ignore_merges=kind.ignores_merges)
    )
    if kind.is_nfc:
        tokenizer.normalizer = nfc_normalizer()
    tokenizer.pre_tokenizer = kind.build()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _add_tokens(tokenizer: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Register control and user-defined tokens, which no merge makes."""
    for token_type, is_special in (
        (TokenType.CONTROL, True),
        (TokenType.UNKNOWN, True),
        (TokenType.USER_DEFINED, False),
    ):
        added = [
            AddedToken(token, special=is_special, normalized=False)
            for token, its_type in zip(tokens, types, strict=True)
            if its_type == token_type and token
        ]
        if is_special:
            tokenizer.add_special_tokens(added)
        else:
            tokenizer.add_tokens(added)


def _token_types(metadata: Mapping[str, GGUFValue], count: int) -> list[int]:
    if _PREFIX + "token_type" not in metadata:
        return [TokenType.NORMAL] * count
    return [int(value) for value in _numbers(metadata, "token_type", count)]


def _token_ids(metadata: Mapping[str, GGUFValue], count: int) -> dict[str, int]:
    ids: dict[str, int] = {}
    for key in (*_ROLES.values(), "eot_token_id", "eom_token_id"):
        value = metadata.get(_PREFIX + key)
        if value is None:
            continue
        if not isinstance(value, int) or not 0 <= value < count:
            raise UnsupportedTokenizer(
                f"{_PREFIX}{key} is {value!r}, outside the vocabulary of {count} tokens"
            )
        ids[key] = value
    return ids


def _numbers(metadata: Mapping[str, GGUFValue], key: str, count: int) -> list[float]:
    values = _array(metadata, key)
    numbers = [value for value in values if isinstance(value, (int, float))]
    if len(numbers) != len(values) or len(values) != count:
        raise UnsupportedTokenizer(
            f"{_PREFIX}{key} has {len(values)} entries of which {len(numbers)} are numbers; "
            f"the vocabulary has {count} tokens"
        )
    return numbers


def _texts(metadata: Mapping[str, GGUFValue], key: str) -> list[str]:
    values = _array(metadata, key)
    texts = [value for value in values if isinstance(value, str)]
    if len(texts) != len(values):
        raise UnsupportedTokenizer(f"{_PREFIX}{key} is not a list of texts")
    return texts


def _array(metadata: Mapping[str, GGUFValue], key: str) -> Sequence[GGUFScalar]:
    value = metadata.get(_PREFIX + key)
    if value is None or isinstance(value, (str, int, float)):
        raise UnsupportedTokenizer(f"{_PREFIX}{key} should be a list, is {value!r:.60}")
    return value


def _text(metadata: Mapping[str, GGUFValue], key: str, *, default: str | None = None) -> str:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, str):
        raise UnsupportedTokenizer(f"{_PREFIX}{key} should be a text, is {value!r:.60}")
    return value


def _optional_text(metadata: Mapping[str, GGUFValue], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise UnsupportedTokenizer(f"{key} should be a text, is {value!r:.60}")
    return value


def _flag(metadata: Mapping[str, GGUFValue], key: str, *, default: bool) -> bool:
    value = metadata.get(_PREFIX + key, default)
    if not isinstance(value, bool):
        raise UnsupportedTokenizer(f"{_PREFIX}{key} should be true or false, is {value!r:.60}")
    return value
