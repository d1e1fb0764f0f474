"""What the draft service was told of each running sequence on the stream that is there now.

Makes the Open, Step and Close messages that bring it up to date. Owned by the engine's thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.v1 import draft_pb2
from target_service.codec import Stamp, StepRow, encode_close, encode_open
from target_service.feature_feed import FeatureFeed
from target_service.link_mailbox import LinkView
from target_service.sequence import Sequence as TokenSequence
from target_service.slots import SlotTable
from target_service.token_bucket import TokenBucket

# Tokens of sequences that are opened again after a resync or a reconnect, and as many more as there
# are features of them: a burst, and the rate behind it.
RESYNC_BURST_TOKENS = 65_536
RESYNC_TOKENS_PER_SECOND = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What one step tells the draft service."""

    opens: list[draft_pb2.LinkRequest]
    # One for each of `asked`: everything committed, every feature, and what is asked for.
    rows: list[StepRow]
    asked: list[TokenSequence]
    # Features of sequences of which nothing is asked now.
    feeding_rows: list[StepRow] = field(default_factory=list)


class Told:
    """Sequences by their arrival. What is not told yet waits here, so that it can be held back."""

    def __init__(self, target_boot_id: int, slots: SlotTable) -> None:
        self._target_boot_id = target_boot_id
        self._slots = slots
        # Committed tokens that the draft service has.
        self._lengths: dict[int, int] = {}
        # Sequences that it will not serve on this stream.
        self._refused: set[int] = set()
        # Sequences that were open before a reconnect or a resync: opening them is rate-limited.
        self._again: set[int] = set()
        self._resyncs = TokenBucket(RESYNC_BURST_TOKENS, RESYNC_TOKENS_PER_SECOND)
        # What was sent of features; None where the drafter needs none.
        self._feed: FeatureFeed | None = None
        self._unsent_opens: list[TokenSequence] = []
        self._unsent_closes: list[tuple[int, int]] = []

    def started(self, sequence: TokenSequence) -> None:
        """It runs from now on and is to be opened."""
        self._unsent_opens.append(sequence)

    def stopped(self, sequence: TokenSequence, slot: tuple[int, int]) -> None:
        """It runs no more; `slot` is its slot and generation."""
        if self._lengths.pop(sequence.arrival, None) is not None:
            self._unsent_closes.append(slot)
        if self._feed is not None:
            self._feed.closed(sequence.arrival)
        self._refused.discard(sequence.arrival)
        self._again.discard(sequence.arrival)
        if sequence in self._unsent_opens:
            self._unsent_opens.remove(sequence)

    def start_stream(self, view: LinkView) -> None:
        """Another stream has taken the place of the old one: nothing is known on it."""
        self._feed = None if view.features is None else FeatureFeed(view.features)
        self._again.update(self._lengths)
        self._again.update(sequence.arrival for sequence in self._unsent_opens)
        self._lengths.clear()
        self._refused.clear()
        self._unsent_closes.clear()

    def forgot(self, sequence: TokenSequence) -> None:
        """The draft service asked for everything again."""
        self._lengths.pop(sequence.arrival, None)
        if self._feed is not None:
            self._feed.closed(sequence.arrival)
        self._again.add(sequence.arrival)

    def refuse(self, sequence: TokenSequence) -> None:
        """The draft service will not serve it."""
        self._refused.add(sequence.arrival)
        if self._feed is not None:
            self._feed.rests(sequence.arrival)

    def may_ask(self, sequence: TokenSequence, view: LinkView) -> bool:
        """A draft for it can be expected at all."""
        return (
            sequence.arrival not in self._refused
            and sequence.committed_length < view.max_sequence_length
        )

    def held_back(self, view: LinkView) -> list[draft_pb2.LinkRequest]:
        """Closes and opens that were not sent yet."""
        messages = []
        if self._unsent_closes:
            messages.append(
                draft_pb2.LinkRequest(
                    close=encode_close(
                        target_boot_id=self._target_boot_id,
                        stream_epoch=view.stream_epoch,
                        rows=self._unsent_closes,
                    )
                )
            )
            self._unsent_closes = []
        opens = [
            self._open(sequence)
            for sequence in self._unsent_opens
            if sequence.arrival not in self._lengths
            and self.may_ask(sequence, view)
            and self._may_open(sequence)
        ]
        self._unsent_opens = []
        return [*messages, *self._open_messages(opens, view)]

    def catch_up(
        self,
        sequences: Sequence[TokenSequence],
        draft_lengths: Sequence[int],
        view: LinkView,
        *,
        is_congested: bool,
    ) -> News:
        """What tells everything committed and asks for drafts, and feeds others. A sequence whose
        opening must wait, or that misses more features than can be sent now, is not asked.

        With congestion, features go only where a few complete them.
        """
        opens, ready, lengths = [], [], []
        for sequence, draft_length in zip(sequences, draft_lengths, strict=True):
            if sequence.arrival not in self._lengths:
                if not self._may_open(sequence):
                    continue
                opens.append(self._open(sequence))
            ready.append(sequence)
            lengths.append(draft_length)
        open_messages = self._open_messages(opens, view)
        if self._feed is None or view.features is None:
            rows = [
                self._row(sequence, draft_length)
                for sequence, draft_length in zip(ready, lengths, strict=True)
            ]
            return News(opens=open_messages, rows=rows, asked=ready)
        chosen, budget = self._feed.to_be_completed(
            ready,
            budget=0 if is_congested else view.features.rows_per_step,
            steady_rows=view.max_draft_length + 1,
        )
        asked = [sequence for sequence, is_chosen in zip(ready, chosen, strict=True) if is_chosen]
        rows = [
            self._row(sequence, draft_length, self._feed)
            for sequence, draft_length, is_chosen in zip(ready, lengths, chosen, strict=True)
            if is_chosen
        ]
        return News(
            opens=open_messages,
            rows=rows,
            asked=asked,
            feeding_rows=self._feeding_rows(self._feed, budget, view),
        )

    def _feeding_rows(self, feed: FeatureFeed, budget: int, view: LinkView) -> list[StepRow]:
        rows = []
        for sequence in feed.hungry():
            if budget <= 0:
                break
            if not self.may_ask(sequence, view):
                feed.rests(sequence.arrival)
                continue
            row = self._row(sequence, 0, feed, limit=budget)
            if row.features is not None:
                budget -= len(row.features.rows)
            rows.append(row)
        return rows

    def _row(
        self,
        sequence: TokenSequence,
        draft_length: int,
        feed: FeatureFeed | None = None,
        limit: int | None = None,
    ) -> StepRow:
        length = self._lengths[sequence.arrival]
        self._lengths[sequence.arrival] = sequence.committed_length
        return StepRow(
            stamp=self._stamp(sequence),
            committed_token_ids=sequence.token_ids[length:],
            draft_length=draft_length,
            features=None if feed is None else feed.take(sequence, limit),
        )

    def _may_open(self, sequence: TokenSequence) -> bool:
        if sequence.arrival not in self._again:
            return True
        tokens = sequence.committed_length
        if self._feed is not None:
            tokens += sequence.cached_length
        if not self._resyncs.take(tokens):
            return False
        self._again.discard(sequence.arrival)
        return True

    def _open(self, sequence: TokenSequence) -> draft_pb2.Open:
        self._lengths[sequence.arrival] = sequence.committed_length
        if self._feed is not None:
            self._feed.opened(sequence)
        return encode_open(self._stamp(sequence), sequence.token_ids, sequence.request.sampling)

    def _open_messages(
        self, opens: Sequence[draft_pb2.Open], view: LinkView
    ) -> list[draft_pb2.LinkRequest]:
        if not opens:
            return []
        return [
            draft_pb2.LinkRequest(
                open=draft_pb2.OpenBatch(
                    target_boot_id=self._target_boot_id,
                    stream_epoch=view.stream_epoch,
                    sequences=opens,
                )
            )
        ]

    def _stamp(self, sequence: TokenSequence) -> Stamp:
        slot, generation = self._slots.find(sequence)
        return Stamp(
            slot=slot,
            generation=generation,
            base_length=sequence.committed_length,
            prefix_hash=sequence.prefix_hash,
        )
