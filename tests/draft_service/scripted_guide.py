"""A guide that replaces what a test says, and keeps what it was asked."""

from collections.abc import Callable, Mapping, Sequence


class ScriptedGuide:
    """`replacements`: offset in the draft -> token id."""

    def __init__(self, replacements: Mapping[int, int]) -> None:
        self.replacements = replacements
        # (drafted so far, the drafter's own token, its probability)
        self.asked: list[tuple[list[int], int, float]] = []

    def choose(
        self, draft_token_ids: Sequence[int], token_id: int, probability: Callable[[], float]
    ) -> int:
        self.asked.append((list(draft_token_ids), token_id, probability()))
        return self.replacements.get(len(draft_token_ids), token_id)
