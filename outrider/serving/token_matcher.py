"""Which tokens may follow an output that has to satisfy a grammar: one sequence's automaton.

It follows the output that it is asked about, wherever that goes: forward with what was accepted,
back where something was not. What it says depends on that output alone.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

_DEAD_END = "no token of the vocabulary goes on from here"


class TokenMatcher:
    """Belongs to one thread at a time. Made by `Grammar.start`."""

    def __init__(
        self, matcher: LLMatcher, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """`matcher` has consumed nothing."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._consumed: list[int] = []
        # Why no more can be said of this output: it breaks the grammar, or following it costs more
        # than a step may. From then on only end tokens are allowed.
        self.failure: str | None = None

    def allowed(self, output: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool [vocab], never all False. End tokens where the output is complete; nothing else
        where it can only end, or has.
        """
        if self.failure is None and self._eos_token_ids.isdisjoint(output):
            self._follow(output)
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            if self._matcher.is_error():
                self.failure = first_words(self._matcher.get_error())
            else:
                allowed = np.unpackbits(bits, count=self._vocab_size, bitorder="little")
                if allowed.any():
                    return allowed.view(np.bool_)
                self.failure = _DEAD_END
        return self._only_end()

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Tokens behind `output` that have no alternative, as far as they are known; maybe none."""
        if self.failure is not None or not self._eos_token_ids.isdisjoint(output):
            return ()
        self._follow(output)
        return () if self.failure is not None else self._matcher.compute_ff_tokens()

    def _follow(self, output: Sequence[int]) -> None:
        consumed = self._consumed
        if consumed != output[: len(consumed)]:
            shared = 0
            for ours, theirs in zip(consumed, output, strict=False):
                if ours != theirs:
                    break
                shared += 1
            self._matcher.rollback(len(consumed) - shared)
            del consumed[shared:]
        for token_id in output[len(consumed) :]:
            if not self._matcher.consume_token(token_id):
                self.failure = first_words(self._matcher.get_error())
                return
            consumed.append(token_id)

    def _only_end(self) -> npt.NDArray[np.bool_]:
        allowed = np.zeros(self._vocab_size, dtype=np.bool_)
        allowed[list(self._eos_token_ids)] = True
        return allowed


def first_words(message: str) -> str:
    """The first line of what llguidance says of an error; the rest shows its inside."""
    line = message.strip().partition("\n")[0].strip()
    if line == "NoExtensionBias":
        return _DEAD_END
    return line if len(line) <= 200 else f"{line[:197]}..."
