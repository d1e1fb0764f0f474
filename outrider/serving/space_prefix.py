"""The space that some tokenizers put before a text, and variants that leave it out.

Some put it before the text's first word only, some before every run between special tokens.
"""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import Tokenizer

# A step of a normalizer or pre-tokenizer as the tokenizers library writes it to JSON; the step
# that takes its place, or None where it needs no change.
_Change = Callable[[dict[str, Any]], dict[str, Any] | None]


def after_special_token(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer for text that is not the first; itself where that makes no difference."""
    return _variant(tokenizer, _never_for_first)


def inside_a_word(tokenizer: Tokenizer) -> Tokenizer:
    """The same tokenizer without any space put first; itself where it puts none."""
    return _variant(tokenizer, _never)


def _never_for_first(step: dict[str, Any]) -> dict[str, Any] | None:
    if step.get("prepend_scheme") == "first":
        return {**step, "prepend_scheme": "never"}
    return None


def _never(step: dict[str, Any]) -> dict[str, Any] | None:
    if step["type"] == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    if step.get("prepend_scheme", "never") != "never":
        return {**step, "prepend_scheme": "never"}
    if step["type"] == "ByteLevel" and step["add_prefix_space"]:
        return {**step, "add_prefix_space": False}
    return None


def _variant(tokenizer: Tokenizer, change: _Change) -> Tokenizer:
    changes: dict[str, dict[str, Any]] = {}
    for part, step in (
        ("normalizer", tokenizer.normalizer),
        ("pre_tokenizer", tokenizer.pre_tokenizer),
    ):
        changed = None if step is None else _changed(json.loads(step.__getstate__()), change)
        if changed is not None:
            changes[part] = changed
    if not changes:
        return tokenizer
    variant = Tokenizer.from_str(json.dumps({**json.loads(tokenizer.to_str()), **changes}))
    variant.encode_special_tokens = tokenizer.encode_special_tokens
    return variant


def _changed(step: dict[str, Any], change: _Change) -> dict[str, Any] | None:
    """`step` with the change applied to it and to the steps in it; None where nothing changed."""
    for key in ("normalizers", "pretokenizers"):
        if key in step:
            inner = [_changed(nested, change) for nested in step[key]]
            if all(nested is None for nested in inner):
                return None
            kept = [new or old for new, old in zip(inner, step[key], strict=True)]
            return {**step, key: kept}
    return change(step)
