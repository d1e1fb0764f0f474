"""Drafts by prompt lookup: continue as the sequence went on after its last tokens stood before.

Needs no model. Holds one sequence's tokens and where each run of one and of three tokens was last
seen; knows nothing of sessions, sampling or the link.
"""

from array import array
from collections.abc import Sequence

# Matches are told apart up to this length; the first to reach it is taken without a vote.
MAX_MATCH_LENGTH = 16

# A draft is at most this many times as long as its match. Replayed answers of a small model keep
# the first token after a match of 1 in a quarter of the cases and the third in a tenth; after a
# match of 16 they keep the eighth in two thirds.
DRAFT_LENGTH_PER_MATCHED_TOKEN = 2

# Earlier occurrences looked at, the latest first.
MAX_CANDIDATES = 64

# The longer of the two indexed runs: finds a long match that many occurrences of its last token
# would hide from the index of single tokens.
_RUN_LENGTH = 3
_RUN_MASK = 2 ** (32 * _RUN_LENGTH) - 1


class SuffixIndex:
    """One sequence's committed token ids (0 .. 2**32 - 1), ready to be continued.

    One thread owns it. At most about 190 bytes a token; `extend` costs the tokens it adds and
    `propose` at most MAX_CANDIDATES * MAX_MATCH_LENGTH comparisons, whatever the length.
    """

    def __init__(self) -> None:
        self._token_ids = array("I")
        # The last position at which a token, or a run packed into one integer, ends.
        self._last_token: dict[int, int] = {}
        self._last_run: dict[int, int] = {}
        # For each position, the one before with the same token or run, or -1.
        self._previous_token = array("i")
        self._previous_run = array("i")

    def __len__(self) -> int:
        return len(self._token_ids)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append committed tokens."""
        position = len(self._token_ids)
        run = self._run_before(position)
        self._token_ids.extend(token_ids)
        for token_id in self._token_ids[position:]:
            self._previous_token.append(self._last_token.get(token_id, -1))
            self._last_token[token_id] = position
            run = (run << 32 | token_id) & _RUN_MASK
            if position >= _RUN_LENGTH - 1:
                self._previous_run.append(self._last_run.get(run, -1))
                self._last_run[run] = position
            else:
                self._previous_run.append(-1)
            position += 1

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens, as if the others had never been added."""
        assert 0 <= length <= len(self), (length, len(self))
        for position in range(len(self) - 1, length - 1, -1):
            run = self._run_before(position + 1)
            _restore(self._last_token, self._token_ids[position], self._previous_token.pop())
            previous_run = self._previous_run.pop()
            if position >= _RUN_LENGTH - 1:
                _restore(self._last_run, run, previous_run)
            self._token_ids.pop()

    def propose(self, draft_length: int) -> tuple[list[int], int]:
        """Up to draft_length tokens, and the length of the match they rest on, which is capped.

        The longest earlier occurrence of the sequence's last tokens is continued; of several as
        long, one with the commonest next token, then the latest. A continuation that reaches the
        end of the sequence goes on into itself, so a loop is continued as a loop. No match gives
        no tokens and length 0; a short match gives a short draft.
        """
        assert draft_length >= 0, draft_length
        match_length, source = self._longest_match()
        length = min(draft_length, DRAFT_LENGTH_PER_MATCHED_TOKEN * match_length)
        draft = self._token_ids[source : source + length].tolist()
        period = len(self) - source
        while len(draft) < length:
            draft.append(draft[-period])
        return draft, match_length

    def _run_before(self, position: int) -> int:
        """The run that ends just before `position`, packed as `extend` packs it."""
        run = 0
        for token_id in self._token_ids[max(0, position - _RUN_LENGTH) : position]:
            run = run << 32 | token_id
        return run

    def _longest_match(self) -> tuple[int, int]:
        """Length of the best match and the position of its continuation; (0, len(self)) if none."""
        if not self._token_ids:
            return 0, 0
        end = len(self) - 1
        if self._previous_run[end] >= 0:
            return self._best_candidate(self._previous_run, _RUN_LENGTH)
        if self._previous_token[end] >= 0:
            return self._best_candidate(self._previous_token, 1)
        return 0, len(self)

    def _best_candidate(self, previous: "array[int]", known_length: int) -> tuple[int, int]:
        token_ids = self._token_ids
        end = len(token_ids) - 1
        best_length = 0
        votes: dict[int, int] = {}  # next token: occurrences; the latest seen comes first
        sources: dict[int, int] = {}  # next token: its latest position
        candidate = previous[end]
        for _ in range(MAX_CANDIDATES):
            length = known_length
            longest = min(MAX_MATCH_LENGTH, candidate + 1)
            while length < longest and token_ids[candidate - length] == token_ids[end - length]:
                length += 1
            if length == MAX_MATCH_LENGTH:
                return length, candidate + 1
            if length > best_length:
                best_length = length
                votes.clear()
                sources.clear()
            if length == best_length:
                next_token_id = token_ids[candidate + 1]
                votes[next_token_id] = votes.get(next_token_id, 0) + 1
                sources.setdefault(next_token_id, candidate + 1)
            candidate = previous[candidate]
            if candidate < 0:
                break
        return best_length, sources[max(votes, key=votes.__getitem__)]


def _restore(last: dict[int, int], key: int, position: int) -> None:
    if position < 0:
        del last[key]
    else:
        last[key] = position
