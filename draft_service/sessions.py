"""What the draft holds of one of a target's sequences: its committed tokens and their hashes.

The commit rules are here. Commits are cumulative and idempotent, and never shrink what is held:
the target's commits are final, so a row that is behind is a replay; only an Open replaces.
"""

from array import array
from collections.abc import Sequence
from enum import Enum, auto
from typing import Generic

from draft_service.drafters.drafter import State
from outrider.engine.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash


class Commit(Enum):
    """What a row's commit came to."""

    APPLIED = auto()
    DUPLICATE = auto()  # everything was known
    STALE = auto()  # a state that was left behind: nothing to do, nothing to propose
    GAP = auto()  # tokens in between are missing
    MISMATCH = auto()  # it is not the same text


class Session(Generic[State]):
    """One sequence. Owned by the engine thread.

    The tokens of its Open are checked against their hash in pieces (`check_opening`), since a
    long prompt's hash takes longer than a step may wait. Until then the Open's own hash is taken
    for theirs; it can only cost drafts that are not accepted.
    """

    __slots__ = (
        "_check_hash",
        "_checked_length",
        "_hashes",
        "generation",
        "opening_length",
        "slot",
        "state",
        "token_ids",
    )

    def __init__(
        self,
        *,
        slot: int,
        generation: int,
        token_ids: "array[int]",
        prefix_hash: int,
        state: State,
    ) -> None:
        self.slot = slot
        self.generation = generation
        self.token_ids = token_ids
        self.state = state
        self.opening_length = len(token_ids)
        self._check_hash = EMPTY_PREFIX_HASH
        self._checked_length = 0
        # _hashes[i] is the hash of the first opening_length + i tokens.
        self._hashes = array("Q", (prefix_hash,))

    @property
    def length(self) -> int:
        """Tokens held: the committed length."""
        return len(self.token_ids)

    @property
    def is_checked(self) -> bool:
        """The Open's tokens have been compared with its hash, and fit it."""
        return self._checked_length == self.opening_length and self._check_hash == self._hashes[0]

    def check_opening(self, count: int) -> bool:
        """Looks at the next `count` tokens of the Open; False once they are not what it said."""
        end = min(self._checked_length + count, self.opening_length)
        self._check_hash = extend_prefix_hash(
            self._check_hash, self.token_ids[self._checked_length : end]
        )
        self._checked_length = end
        return end < self.opening_length or self.is_checked

    def commit(
        self, *, base_length: int, prefix_hash: int, count: int, token_ids: Sequence[int]
    ) -> Commit:
        """Takes the last `count` of `base_length` tokens, as far as they are new."""
        held = len(self.token_ids)
        if base_length < held:
            if base_length < self.opening_length:
                return Commit.STALE
            known = self._hashes[base_length - self.opening_length]
            return Commit.STALE if known == prefix_hash else Commit.MISMATCH
        if base_length == held:
            return Commit.DUPLICATE if self._hashes[-1] == prefix_hash else Commit.MISMATCH
        if count > base_length:
            return Commit.MISMATCH
        if base_length - count > held:
            return Commit.GAP
        hashes = array("Q")
        running = self._hashes[-1]
        new = token_ids[count - (base_length - held) :]
        for token_id in new:
            running = extend_prefix_hash(running, (token_id,))
            hashes.append(running)
        if running != prefix_hash:
            return Commit.MISMATCH
        self.token_ids.extend(new)
        self._hashes.extend(hashes)
        return Commit.APPLIED
