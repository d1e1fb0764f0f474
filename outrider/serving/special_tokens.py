"""Finding special tokens in text, and telling them from text that only spells them."""

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tokenizers import AddedToken

# Unicode's White_Space: what a token that swallows the space around it swallows.
_WHITE_SPACE: Final = (
    "\t\n\v\f\r \x85\xa0\u1680\u2000\u2001\u2002\u2003\u2004\u2005\u2006\u2007\u2008\u2009\u200a"
    "\u2028\u2029\u202f\u205f\u3000"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecialTokens:
    """The special tokens of a vocabulary: their ids by text, and how each is found in text."""

    ids_by_text: Mapping[str, int]
    strips_left: frozenset[str]
    strips_right: frozenset[str]
    pattern: re.Pattern[str]

    def starts(self, text: str) -> list[int]:
        """Every offset at which a special token starts in `text`, overlapping ones too."""
        offsets: list[int] = []
        found = self.pattern.search(text)
        while found is not None:
            offsets.append(found.start())
            found = self.pattern.search(text, found.start() + 1)
        return offsets

    def split(self, text: str, *, protected: Collection[int] = ()) -> Iterator[str | int]:
        """The text in order as plain runs (never empty) and ids of special tokens.

        The longest token wins where several start. None is seen at a `protected` offset.
        """
        run_start = 0
        search_from = 0
        while (found := self.pattern.search(text, search_from)) is not None:
            if found.start() in protected:
                search_from = found.start() + 1
                continue
            token = found[0]
            run = text[run_start : found.start()]
            if token in self.strips_left:
                run = run.rstrip(_WHITE_SPACE)
            if run:
                yield run
            yield self.ids_by_text[token]
            run_start = search_from = found.end()
            if token in self.strips_right:
                rest = text[run_start:]
                run_start = search_from = len(text) - len(rest.lstrip(_WHITE_SPACE))
        if run_start < len(text):
            yield text[run_start:]


def special_tokens(added_tokens: Mapping[int, AddedToken]) -> SpecialTokens:
    """The special ones among a tokenizer's added tokens."""
    special = {
        token.content: (token_id, token)
        for token_id, token in added_tokens.items()
        if token.special and token.content
    }
    longest_first = sorted(special, key=lambda text: (-len(text), text))
    alternatives = [
        rf"(?<!\w){re.escape(text)}(?!\w)" if special[text][1].single_word else re.escape(text)
        for text in longest_first
    ]
    return SpecialTokens(
        ids_by_text={text: token_id for text, (token_id, _) in special.items()},
        strips_left=frozenset(text for text, (_, token) in special.items() if token.lstrip),
        strips_right=frozenset(text for text, (_, token) in special.items() if token.rstrip),
        # A pattern that never matches, where there are none.
        pattern=re.compile("|".join(alternatives) or "(?!)"),
    )
