"""What a drafter is to the service: it holds sequences and proposes continuations of them.

It knows neither links nor messages. Everything here runs on one thread.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from outrider.engine.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureNeeds:
    """What a drafter needs of the target's hidden states."""

    layer_ids: tuple[int, ...]  # residual stream entering these decoder layers
    width: int  # numbers of a projected row
    dtype: str  # bfloat16 or float16
    projection_sha256: str  # of `projection`
    target_hidden_size: int  # width of the residual stream that the projection takes
    # What the target runs at the end of its step: safetensors, as load_projection reads them.
    projection: bytes = field(repr=False)

    @property
    def row_bytes(self) -> int:
        """Bytes of one projected row."""
        return 2 * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureRows:
    """Projected features of consecutive positions, as they came.

    The features of position p are those of the target's row of token p: with token p + 1 they make
    the drafter's row p.
    """

    first_position: int
    rows: bytes  # row after row, FeatureNeeds.row_bytes each


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterOffer:
    """What a drafter is and can do; announced in the handshake."""

    name: str
    fingerprint: str  # empty without a model
    max_draft_length: int
    max_sequence_length: int
    feature_needs: FeatureNeeds | None


# A drafter's own state of one sequence.
State = TypeVar("State")


class Guide(Protocol):
    """Has a word in each position of a draft, where the drafter has a word for it at all."""

    def choose(
        self, draft_token_ids: Sequence[int], token_id: int, probability: Callable[[], float]
    ) -> int:
        """The token behind those drafted so far, in place of the drafter's own `token_id`, to
        which the drafter gives this probability. Called once for each position, ascending.
        """


class Wish(NamedTuple, Generic[State]):
    """One draft that is asked for."""

    state: State
    draft_length: int  # >= 1
    # time.monotonic() behind which a longer draft is of less use than a shorter one now.
    finish_by: float
    # Asked at each position by drafters that draw one token after the other.
    guide: Guide | None = None


class Proposal(NamedTuple):
    """A draft, and how much speaks for it."""

    token_ids: list[int]
    # Comparable among proposals of one drafter: higher is surer. 0 where it has nothing to say.
    evidence: int = 0


NO_PROPOSAL = Proposal([])


class Drafter(Protocol[State]):
    """The cheap proposer.

    `token_ids` given to `open` is live: the service appends commits to it, and it never shrinks.
    A drafter keeps its own cursor into it, and `backlog` is what lies behind the cursor.
    """

    @property
    def offer(self) -> DrafterOffer:
        """What it is."""

    def open(self, token_ids: "array[int]", sampling: Sampling) -> State:
        """State for a sequence. Does no work on its tokens yet."""

    def add_features(self, state: State, features: FeatureRows) -> bool:
        """Features of committed positions. Called only where the offer has feature_needs.

        Positions that it has are ignored; False where positions before them are missing, except
        at a sequence's start: features may begin anywhere.
        """

    def reserve(self, state: State, length: int) -> bool:
        """Makes sure of the memory for `length` tokens; False where there is none.

        After False the service closes the sequence.
        """

    def backlog(self, state: State) -> int:
        """Committed tokens that it has not worked on."""

    @property
    def max_backlog(self) -> int:
        """A sequence with a longer backlog has to be prepared before drafts are asked of it."""

    def prepare(self, states: Sequence[State], budget_seconds: float) -> None:
        """One piece of work on backlogs, of about so many seconds: drafts may wait behind it."""

    def propose(self, wishes: Sequence[Wish[State]]) -> list[Proposal]:
        """A draft for each wish, at most as long as wished; empty where it knows nothing.

        States are distinct, reserved for their length plus the draft's, their backlogs at most
        max_backlog.
        """

    def close(self, state: State) -> None:
        """Frees everything that the sequence had."""


# Only an argument of the protocol below.
Continued = TypeVar("Continued", contravariant=True)


@runtime_checkable
class Continues(Protocol[Continued]):
    """What a drafter may be able to do besides: say how a draft that is not its own goes on."""

    def continue_from(self, state: Continued, draft_token_ids: Sequence[int]) -> Proposal:
        """One token behind the committed ones and these, within microseconds, and its evidence;
        NO_PROPOSAL where it knows none or is not able to. Changes nothing.
        """
