"""The target's step as its loop sees it: rows of sequences go in, verdicts come out.

Where tokens are drawn, on the host or on a device, is the engine's business.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.engine.acceptance import Verdict
from outrider.engine.feature_tap import Tap
from outrider.engine.logit_rules import RuledText
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """One sequence's rows of a step, and how its tokens are drawn.

    Decoding, the rows are the last committed token and then the draft, all with logits. Otherwise
    they are a piece of the prompt: its last row alone has logits, if the prompt ends there.
    """

    rows: SequenceRows
    draft_length: int  # the last so many of the rows' tokens are drafts
    sampling: Sampling | None  # None: nothing is drawn
    base_length: int  # position of the first token drawn: tokens of prompt and output before it
    ruled: RuledText | None = None  # what changes its logits; None: nothing does


class RunningStep(Protocol):
    """A step that has been started."""

    def verdicts(self) -> list[Verdict]:
        """Of every sequence with a sampling, in order. Waits until they are there, and the rows'
        keys, values and features are kept. Raises LogitsError; called once.
        """
        ...


class StepEngine(Protocol):
    """Runs steps, one after another, on one thread."""

    @property
    def runs_beside_host(self) -> bool:
        """`launch` returns while the step runs, and the host may do something else meanwhile."""
        ...

    def launch(self, sequences: Sequence[SequenceStep], tap: Tap | None) -> RunningStep:
        """Starts a step; the tap keeps the features of its rows. Raises StepError for rows beyond
        the engine's limits.
        """
        ...

    def make_tap(self, data: bytes) -> Tap:
        """A tap with the projection of these bytes (see `feature_projection`), with nothing kept
        yet. May be called on any thread; raises CheckpointError.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRow:
    """One sequence's row of a step that is launched ahead. Its token is the one that the step
    before it draws, and nobody on the host knows that yet.
    """

    index: int  # of the sequence in the step before, where it draws and has no draft
    start: int  # place of the token in the cache
    block_table: Sequence[int]  # covers start + 1 tokens
    sampling: Sampling
    base_length: int  # position of the token that this row draws


class AheadEngine(Protocol):
    """A StepEngine that takes a plain step while the one before it still runs."""

    def launch_next(
        self, rows: Sequence[NextRow], tap: Tap | None, *, after: RunningStep
    ) -> RunningStep:
        """Has a step of these rows run behind `after`, which was launched last, and returns at
        once. The verdicts of `after` are taken before anything else is launched, then those of
        this step: what either of them returns is kept apart until then. Raises StepError for rows
        beyond the engine's limits.
        """
        ...
