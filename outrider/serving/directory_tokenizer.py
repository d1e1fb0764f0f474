"""A tokenizer from a checkpoint directory: tokenizer.json and the small files around it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from outrider.serving.tokenizer_parts import TokenizerParts, UnsupportedTokenizer

_ROLES: Final = (
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
)  # fmt: skip


def read_directory_tokenizer(path: Path) -> TokenizerParts:
    """Build the tokenizer of a checkpoint directory; raises UnsupportedTokenizer."""
    tokenizer = _read_tokenizer(path / "tokenizer.json")
    settings = _read_json(path / "tokenizer_config.json")
    model_config = _read_json(path / "config.json")
    generation_config = _read_json(path / "generation_config.json")
    special_tokens = _special_tokens(_read_json(path / "special_tokens_map.json"), settings)
    _mark_special(tokenizer, special_tokens)

    known_ids = tokenizer.get_vocab(with_added_tokens=True)
    bos_token = special_tokens.get("bos_token")
    eos_token = special_tokens.get("eos_token")
    eos_token_ids = [
        *_id_list(generation_config, path / "generation_config.json"),
        *_id_list(model_config, path / "config.json"),
        *([known_ids[eos_token]] if eos_token in known_ids else []),
    ]
    return TokenizerParts(
        tokenizer=tokenizer,
        vocab_size=_vocab_size(model_config, max(known_ids.values()) + 1, path),
        bos_token_id=known_ids[bos_token] if bos_token in known_ids else None,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        adds_bos=_adds_bos(tokenizer, settings),
        special_tokens=special_tokens,
        chat_template=_chat_template(path, settings),
    )


def _read_tokenizer(path: Path) -> Tokenizer:
    if not path.is_file():
        raise UnsupportedTokenizer(
            f"{path.parent} has no tokenizer.json; a tokenizer.model alone is not supported"
        )
    # The library's own errors have no type to catch, so the file's outline is checked first.
    content = _read_json(path)
    model = content.get("model")
    if not isinstance(model, dict) or "vocab" not in model:
        raise UnsupportedTokenizer(f"{path} has no model with a vocabulary")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedTokenizer(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedTokenizer(f"{path} holds a {type(value).__name__}, not an object")
    return value


def _special_tokens(*sources: Mapping[str, Any]) -> dict[str, str]:
    """Role to text; a later source wins. A token is a text or an object with `content`."""
    texts: dict[str, str] = {}
    for source in sources:
        for role in _ROLES:
            value = source.get(role)
            if isinstance(value, dict):
                value = value.get("content")
            if isinstance(value, str):
                texts[role] = value
    return texts


def _mark_special(tokenizer: Tokenizer, special_tokens: Mapping[str, str]) -> None:
    """Tokens with a role are special even where tokenizer.json forgot to say so."""
    added = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for text in dict.fromkeys(special_tokens.values()):
        is_marked = text in added and added[text].special
        if text and not is_marked and tokenizer.token_to_id(text) is not None:
            tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False)])


def _id_list(config: Mapping[str, Any], path: Path) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and token_id >= 0 for token_id in ids):
        raise UnsupportedTokenizer(f"{path}: eos_token_id is {value!r}, not one or more token ids")
    return ids


def _vocab_size(config: Mapping[str, Any], token_count: int, path: Path) -> int:
    size = config.get("vocab_size", token_count)
    if not isinstance(size, int) or size < 1:
        raise UnsupportedTokenizer(f"{path / 'config.json'}: vocab_size is {size!r}")
    return size


def _adds_bos(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> bool:
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool):
        return stated
    # The post-processor of tokenizer.json shows what it adds when there is no text at all.
    return bool(tokenizer.encode("", add_special_tokens=True).ids)


def _chat_template(path: Path, settings: Mapping[str, Any]) -> str | None:
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        return own_file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise UnsupportedTokenizer(f"{path / 'tokenizer_config.json'}: chat_template is no text")
    return template
