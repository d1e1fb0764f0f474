"""Token ids of one growing sequence to text, piece by piece."""

import codecs
from collections.abc import Iterable

from outrider.serving.tokenizer import Vocabulary


class Detokenizer:
    """The text of one sequence as its tokens come; one object each, not for several threads.

    Everything returned, joined, equals `vocabulary.decode` of all ids with the same options. A
    token costs the same however long the text is. `continues_text` says that the ids follow a
    prompt whose text is not repeated, so that a space before their first word stays.
    """

    def __init__(self, vocabulary: Vocabulary, *, skip_special: bool, continues_text: bool) -> None:
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._at_start = not continues_text
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Iterable[int]) -> str:
        """The new text; a character comes with the token that completes it.

        Raises ValueError for an id outside the vocabulary.
        """
        vocabulary = self._vocabulary
        parts: list[bytes] = []
        for token_id in token_ids:
            at_start = self._at_start
            part = (
                vocabulary.first_bytes_of(token_id) if at_start else vocabulary.bytes_of(token_id)
            )
            if vocabulary.adds_text(token_id, skip_special=self._skip_special):
                parts.append(part)
                self._at_start = False
        return self._decoder.decode(b"".join(parts))

    def finish(self) -> str:
        """The sequence ends here: an incomplete character, if there is one, as U+FFFD."""
        return self._decoder.decode(b"", final=True)
