"""What a model's files say about its tokenizer, whatever their format."""

from collections.abc import Mapping
from dataclasses import dataclass

from tokenizers import Tokenizer

from outrider.serving.errors import ConfigurationError


class UnsupportedTokenizer(ConfigurationError):
    """A model's tokenizer is of a kind that is not implemented, or its files are inconsistent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """A tokenizer as read, before anything is derived from it.

    `special_tokens` maps roles of chat templates (`bos_token`, `eos_token`, ...) to texts;
    `eos_token_ids` are all that the files name, in their order; `adds_bos` says whether plain
    text gets a beginning-of-sequence token.
    """

    tokenizer: Tokenizer
    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    adds_bos: bool
    special_tokens: Mapping[str, str]
    chat_template: str | None
