"""A proposal, used or not, while the sequence goes on: how much of it turns out right."""

from array import array
from collections.abc import Callable

from draft_service.drafters.hybrid_rule import TextFit

# Stands behind a proposal that is shorter than was wished: right nowhere.
MISSING = -1


class Usage:
    """What has come of one drafter's proposals that were used."""

    __slots__ = ("accepted_tokens", "drafts")

    def __init__(self) -> None:
        self.drafts = 0
        self.accepted_tokens = 0  # as far as they were compared


class Trial:
    """One proposal under comparison. Each position is counted once, when its token is there."""

    __slots__ = (
        "_count",
        "_expected_length",
        "_fit",
        "_start",
        "_token_ids",
        "_usage",
        "accepted_length",
    )

    def __init__(
        self,
        token_ids: list[int],
        *,
        start: int,
        expected_length: float,
        count: Callable[[int, bool], None],
        fit: TextFit,
        usage: Usage | None,
    ) -> None:
        """`start`: the position of its first token; `count` learns of each compared position,
        `fit` of the whole once it is settled, and `usage`, given where the proposal was used, of
        accepted tokens.
        """
        self._token_ids = token_ids
        self._start = start
        self._expected_length = expected_length
        self._count = count
        self._fit = fit
        self._usage = usage
        if usage is not None:
            usage.drafts += 1
        self.accepted_length = 0  # so far

    def compare(self, committed: "array[int]") -> bool:
        """As far as the sequence goes; True once it is settled: wrong somewhere, or all right."""
        while self.accepted_length < len(self._token_ids):
            position = self._start + self.accepted_length
            if position >= len(committed):
                return False
            is_right = committed[position] == self._token_ids[self.accepted_length]
            self._count(self.accepted_length, is_right)
            if not is_right:
                break
            self.accepted_length += 1
            if self._usage is not None:
                self._usage.accepted_tokens += 1
        self._fit.count(self._expected_length, self.accepted_length)
        return True
