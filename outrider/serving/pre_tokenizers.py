"""The pre-tokenizers and normalizers that GGUF files call by name (`tokenizer.ggml.pre`)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from tokenizers import Regex, normalizers, pre_tokenizers

from outrider.serving.tokenizer_parts import UnsupportedTokenizer

# How each family cuts text into words, as published in the models' own tokenizer.json files.
_LLAMA_3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_2: Final = _LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN: Final = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT_2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DEFAULT: Final = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPreTokenizer:
    """How one family of byte-level tokenizers treats text before its merges apply.

    `ignores_merges`: a word that is a token as a whole stays one, whatever the merges say.
    `adds_bos` is the family's habit where the file does not say.
    """

    build: Callable[[], pre_tokenizers.PreTokenizer]
    ignores_merges: bool = False
    is_nfc: bool = False
    adds_bos: bool = False


def named_pre_tokenizer(name: str) -> NamedPreTokenizer:
    """Look a pre-tokenizer up; raises UnsupportedTokenizer with the names that exist."""
    if name not in _BY_NAME:
        raise UnsupportedTokenizer(
            f"pre-tokenizer {name!r} is not implemented; known: {', '.join(sorted(_BY_NAME))}"
        )
    return _BY_NAME[name]


def nfc_normalizer() -> normalizers.Normalizer:
    """Unicode composition, where the family composes its text first."""
    return normalizers.NFC()


def _words(*patterns: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        splits: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns
        ]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, to_bytes])

    return build


_GPT_2_KIND: Final = NamedPreTokenizer(build=_words(_GPT_2))
_SINGLE_DIGITS_KIND: Final = NamedPreTokenizer(build=_words(r"\p{N}", _GPT_2))
_LLAMA_3_KIND: Final = NamedPreTokenizer(build=_words(_LLAMA_3), ignores_merges=True, adds_bos=True)
_QWEN_2_KIND: Final = NamedPreTokenizer(build=_words(_QWEN_2), is_nfc=True)

_BY_NAME: Final = {
    "default": NamedPreTokenizer(build=_words(*_DEFAULT)),
    "gpt-2": _GPT_2_KIND,
    "smollm": _SINGLE_DIGITS_KIND,
    "starcoder": _SINGLE_DIGITS_KIND,
    "llama-bpe": _LLAMA_3_KIND,
    "llama3": _LLAMA_3_KIND,
    "llama-v3": _LLAMA_3_KIND,
    "qwen2": _QWEN_2_KIND,
    "deepseek-r1-qwen": NamedPreTokenizer(build=_words(_QWEN_2), adds_bos=True),
    "tekken": NamedPreTokenizer(build=_words(_TEKKEN), ignores_merges=True, adds_bos=True),
}
