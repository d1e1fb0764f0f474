"""Text to token ids and back, for one model. Knows no torch, no sequences and no requests."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tokenizers import Tokenizer

from outrider.serving.directory_tokenizer import read_directory_tokenizer
from outrider.serving.errors import InvalidArgument
from outrider.serving.gguf_tokenizer import read_gguf_tokenizer
from outrider.serving.space_prefix import after_special_token, inside_a_word
from outrider.serving.special_tokens import SpecialTokens, special_tokens
from outrider.serving.token_bytes import TokenBytes, token_bytes
from outrider.serving.tokenizer_hash import tokenizer_sha256
from outrider.serving.tokenizer_parts import TokenizerParts


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A model's tokenizer with everything that a service asks of it. Safe to share by threads.

    `vocab_size` counts the rows of the model's embedding, which may exceed the tokens that have
    a text. `adds_bos` is the model's habit for plain text. `special_tokens` maps the roles that
    chat templates know (`bos_token`, ...) to texts. `sha256` is described in tokenizer_hash.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    adds_bos: bool
    special: SpecialTokens = field(repr=False)
    special_token_ids: frozenset[int] = field(repr=False)
    special_tokens: Mapping[str, str]
    chat_template: str | None = field(repr=False)
    sha256: str
    token_bytes: TokenBytes
    # For a run at a text's start, for one after a special token, and for one inside a word.
    first_run: Tokenizer = field(repr=False)
    later_run: Tokenizer = field(repr=False)
    inner_run: Tokenizer = field(repr=False)

    def encode(
        self,
        text: str,
        *,
        parse_special: bool,
        add_bos: bool,
        protected: Collection[int] = (),
    ) -> list[int]:
        """Token ids of `text`.

        With `parse_special`, a special token's text becomes that token, except at the offsets in
        `protected`; without it, nothing in the text can become a special token. `add_bos` puts
        the model's beginning-of-sequence token first where the model has the habit.
        Raises InvalidArgument for text with lone surrogates.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = text[error.start]
            bound = f"Unicode without lone surrogates (one is at offset {error.start})"
            raise InvalidArgument("text", found, bound) from error
        ids: list[int] = []
        if add_bos and self.adds_bos and self.bos_token_id is not None:
            ids.append(self.bos_token_id)
        if not parse_special:
            return ids + self._encode_run(self.first_run, text)
        run_encoder = self.first_run
        for part in self.special.split(text, protected=protected):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids.extend(self._encode_run(run_encoder, part))
            run_encoder = self.later_run
        return ids

    def encode_continuation(self, text: str) -> list[int]:
        """Token ids of text that goes on in the middle of a word, without special tokens."""
        return self._encode_run(self.inner_run, text)

    def decode(
        self, token_ids: Iterable[int], *, skip_special: bool, continues_text: bool = False
    ) -> str:
        """The text of `token_ids`; bytes that are no UTF-8 become U+FFFD.

        The space that SentencePiece puts before a text's first word is dropped, unless the ids
        continue a text. Raises ValueError for an id outside the vocabulary.
        """
        parts: list[bytes] = []
        for token_id in token_ids:
            is_first = not (parts or continues_text)
            part = self.first_bytes_of(token_id) if is_first else self.bytes_of(token_id)
            if self.adds_text(token_id, skip_special=skip_special):
                parts.append(part)
        return b"".join(parts).decode("utf-8", errors="replace")

    def adds_text(self, token_id: int, *, skip_special: bool) -> bool:
        """Whether a token is part of a text at all: no empty row, no skipped special token."""
        if skip_special and token_id in self.special_token_ids:
            return False
        return bool(self.token_bytes.by_id[token_id])

    def bytes_of(self, token_id: int) -> bytes:
        """What one token adds to a text; empty for a row of the model that has no token."""
        if not 0 <= token_id < len(self.token_bytes.by_id):
            raise ValueError(
                f"token id {token_id} is not in the vocabulary of {len(self.token_bytes.by_id)}"
            )
        return self.token_bytes.by_id[token_id]

    def first_bytes_of(self, token_id: int) -> bytes:
        """What the first token of a text adds to it."""
        usual = self.bytes_of(token_id)
        return self.token_bytes.first_by_id.get(token_id, usual)

    def _encode_run(self, encoder: Tokenizer, text: str) -> list[int]:
        encoding = encoder.encode(text, add_special_tokens=False)
        ids: list[int] = encoding.ids
        if self.special_token_ids.isdisjoint(ids):
            return ids
        # The merges spelled special tokens: cut the text inside each, so that they cannot. A
        # single character stays: it is the unknown token, or the token is that character.
        cuts = [
            start + 1
            for token_id, (start, end) in zip(ids, encoding.offsets, strict=True)
            if token_id in self.special_token_ids and end - start > 1
        ]
        if not cuts:
            return ids
        ids = self._encode_run(encoder, text[: cuts[0]])
        for start, end in pairwise((*cuts, len(text))):
            ids += self._encode_run(self.inner_run, text[start:end])
        return ids


def load_tokenizer(path: Path) -> Vocabulary:
    """Read the tokenizer of a checkpoint directory or a .gguf file.

    Raises UnsupportedTokenizer or CorruptGGUF (both ValueError), naming what was wrong.
    """
    parts = read_directory_tokenizer(path) if path.is_dir() else read_gguf_tokenizer(path)
    return _vocabulary(parts)


def _vocabulary(parts: TokenizerParts) -> Vocabulary:
    tokenizer = parts.tokenizer
    special = special_tokens(tokenizer.get_added_tokens_decoder())
    # Special tokens are found by SpecialTokens alone, so that the caller decides about each.
    tokenizer.encode_special_tokens = True
    return Vocabulary(
        vocab_size=parts.vocab_size,
        bos_token_id=parts.bos_token_id,
        eos_token_ids=parts.eos_token_ids,
        adds_bos=parts.adds_bos and parts.bos_token_id is not None,
        special=special,
        special_token_ids=frozenset(special.ids_by_text.values()),
        special_tokens=parts.special_tokens,
        chat_template=parts.chat_template,
        sha256=tokenizer_sha256(tokenizer, special),
        token_bytes=token_bytes(tokenizer, parts.vocab_size),
        first_run=tokenizer,
        later_run=after_special_token(tokenizer),
        inner_run=inside_a_word(tokenizer),
    )
