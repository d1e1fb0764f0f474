"""The decision which draft tokens stand. Knows nothing of models, logits or noise."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What one verify step decided about one draft."""

    accepted_length: int
    bonus_token_id: int

    def emitted_token_ids(self, draft_token_ids: Sequence[int]) -> list[int]:
        """The tokens that the step adds to the sequence: the accepted ones and the bonus token."""
        assert self.accepted_length <= len(draft_token_ids)
        return [*draft_token_ids[: self.accepted_length], self.bonus_token_id]


def verify(draft_token_ids: Sequence[int], target_token: Callable[[int], int]) -> Verdict:
    """Keep the longest draft prefix that equals the target's own tokens.

    target_token(i) is the target's token once draft_token_ids[:i] is accepted. It is asked for
    i = 0, 1, ... accepted_length, each once and none further, so that sampling costs only the
    tokens that are emitted.
    """
    for accepted_length, draft_token_id in enumerate(draft_token_ids):
        token_id = target_token(accepted_length)
        if token_id != draft_token_id:
            return Verdict(accepted_length=accepted_length, bonus_token_id=token_id)
    accepted_length = len(draft_token_ids)
    return Verdict(accepted_length=accepted_length, bonus_token_id=target_token(accepted_length))
