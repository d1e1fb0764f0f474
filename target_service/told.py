"""What the draft service was told of each running sequence on the stream that is there now.

Makes the Open, Step and Close messages that bring it up to date. Owned by the engine's thread.
"""

from collections.abc import Sequence

from outrider.v1 import draft_pb2
from target_service.codec import Stamp, StepRow, encode_close, encode_open
from target_service.link_mailbox import LinkView
from target_service.sequence import Sequence as TokenSequence
from target_service.slots import SlotTable
from target_service.token_bucket import TokenBucket

# Tokens of sequences that are opened again after a resync or a reconnect: a burst, and the rate
# behind it.
RESYNC_BURST_TOKENS = 65_536
RESYNC_TOKENS_PER_SECOND = 65_536


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
        self._unsent_opens: list[TokenSequence] = []
        self._unsent_closes: list[tuple[int, int]] = []

    def started(self, sequence: TokenSequence) -> None:
        """It runs from now on and is to be opened."""
        self._unsent_opens.append(sequence)

    def stopped(self, sequence: TokenSequence, slot: tuple[int, int]) -> None:
        """It runs no more; `slot` is its slot and generation."""
        if self._lengths.pop(sequence.arrival, None) is not None:
            self._unsent_closes.append(slot)
        self._refused.discard(sequence.arrival)
        self._again.discard(sequence.arrival)
        if sequence in self._unsent_opens:
            self._unsent_opens.remove(sequence)

    def start_stream(self) -> None:
        """Another stream has taken the place of the old one: nothing is known on it."""
        self._again.update(self._lengths)
        self._again.update(sequence.arrival for sequence in self._unsent_opens)
        self._lengths.clear()
        self._refused.clear()
        self._unsent_closes.clear()

    def forgot(self, sequence: TokenSequence) -> None:
        """The draft service asked for everything again."""
        self._lengths.pop(sequence.arrival, None)
        self._again.add(sequence.arrival)

    def refuse(self, sequence: TokenSequence) -> None:
        """The draft service will not serve it."""
        self._refused.add(sequence.arrival)

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
        self, sequences: Sequence[TokenSequence], draft_lengths: Sequence[int], view: LinkView
    ) -> tuple[list[draft_pb2.LinkRequest], list[StepRow], list[TokenSequence]]:
        """Opens and step rows that tell everything committed and ask for drafts; and the sequences
        of the rows. One whose opening must wait is left out.
        """
        opens, rows, asked = [], [], []
        for sequence, draft_length in zip(sequences, draft_lengths, strict=True):
            length = self._lengths.get(sequence.arrival)
            if length is None:
                if not self._may_open(sequence):
                    continue
                opens.append(self._open(sequence))
                length = sequence.committed_length
            rows.append(
                StepRow(
                    stamp=self._stamp(sequence),
                    committed_token_ids=sequence.token_ids[length:],
                    draft_length=draft_length,
                )
            )
            self._lengths[sequence.arrival] = sequence.committed_length
            asked.append(sequence)
        return self._open_messages(opens, view), rows, asked

    def _may_open(self, sequence: TokenSequence) -> bool:
        if sequence.arrival not in self._again:
            return True
        if not self._resyncs.take(sequence.committed_length):
            return False
        self._again.discard(sequence.arrival)
        return True

    def _open(self, sequence: TokenSequence) -> draft_pb2.Open:
        self._lengths[sequence.arrival] = sequence.committed_length
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
