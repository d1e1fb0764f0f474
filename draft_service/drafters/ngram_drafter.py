"""The n-gram drafter: prompt lookup over each sequence's own tokens. Needs no model."""

from array import array
from collections.abc import Sequence

from draft_service.drafters.drafter import (
    NO_PROPOSAL,
    DrafterOffer,
    FeatureRows,
    Proposal,
    Wish,
)
from draft_service.drafters.ngram import SuffixIndex
from outrider.engine.sampling import Sampling

NAME = "ngram"
MAX_DRAFT_LENGTH = 32
# At about 190 bytes a token an index of this length has 50 MB.
MAX_SEQUENCE_LENGTH = 2**18

# Tokens indexed in one piece of work: about 0.3 ms.
TOKENS_PER_PIECE = 256


class NgramSequence:
    """One sequence: the live tokens and an index over the first of them."""

    __slots__ = ("index", "token_ids")

    def __init__(self, token_ids: "array[int]") -> None:
        self.token_ids = token_ids
        self.index = SuffixIndex()

    def catch_up(self, count: int) -> None:
        """Indexes the next `count` tokens."""
        indexed = len(self.index)
        self.index.extend(self.token_ids[indexed : indexed + count].tolist())


class NgramDrafter:
    """Proposes what followed the last tokens where they stood before; continues others' drafts."""

    max_backlog = TOKENS_PER_PIECE

    def __init__(self) -> None:
        self.offer = DrafterOffer(
            name=NAME,
            fingerprint="",
            max_draft_length=MAX_DRAFT_LENGTH,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            feature_needs=None,
        )

    def open(self, token_ids: "array[int]", sampling: Sampling) -> NgramSequence:
        """Sampling does not matter: the text alone says what comes."""
        return NgramSequence(token_ids)

    def add_features(self, state: NgramSequence, features: FeatureRows) -> bool:
        """Never called: it needs none."""
        raise AssertionError("the n-gram drafter announced no need of features")

    def reserve(self, state: NgramSequence, length: int) -> bool:
        """Always there: the bounds on sequences and their length bound the memory."""
        return True

    def backlog(self, state: NgramSequence) -> int:
        """Tokens not indexed yet."""
        return len(state.token_ids) - len(state.index)

    def prepare(self, states: Sequence[NgramSequence], budget_seconds: float) -> None:
        """Indexes a piece of the first sequence, within any budget."""
        states[0].catch_up(TOKENS_PER_PIECE)

    def propose(self, wishes: Sequence[Wish[NgramSequence]]) -> list[Proposal]:
        """Continues each from its longest match, well within any time; evidence is its length."""
        proposals = []
        for wish in wishes:
            wish.state.catch_up(self.max_backlog)
            proposals.append(Proposal(*wish.state.index.propose(wish.draft_length)))
        return proposals

    def continue_from(self, state: NgramSequence, draft_token_ids: Sequence[int]) -> Proposal:
        """The token behind the longest match of the committed tokens and these.

        NO_PROPOSAL also while more than max_backlog tokens are not indexed, and beyond the bound
        on a sequence's length.
        """
        length = len(state.token_ids)
        if (
            self.backlog(state) > self.max_backlog
            or length + len(draft_token_ids) >= MAX_SEQUENCE_LENGTH
        ):
            return NO_PROPOSAL
        state.catch_up(self.max_backlog)
        if not draft_token_ids:
            return Proposal(*state.index.propose(1))
        state.index.extend(draft_token_ids)
        proposal = Proposal(*state.index.propose(1))
        state.index.truncate(length)
        return proposal

    def close(self, state: NgramSequence) -> None:
        """The index goes with the state."""
