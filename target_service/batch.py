"""One step's rows, and which sequence each verdict on them is about."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.acceptance import Verdict
from outrider.engine.step import SequenceRows
from outrider.engine.verify_step import NextRow, SequenceStep
from target_service.scheduler import PrefillChunk
from target_service.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRow:
    """One decoding sequence of a step, with the draft that it verifies, if any."""

    sequence: TokenSequence
    draft_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What one step computes."""

    decode_rows: Sequence[DecodeRow]
    chunks: Sequence[PrefillChunk]

    @property
    def is_speculative(self) -> bool:
        """At least one draft is verified."""
        return any(row.draft_token_ids for row in self.decode_rows)

    def has_row_of(self, sequence: TokenSequence) -> bool:
        """It is among the decode rows."""
        return any(row.sequence is sequence for row in self.decode_rows)

    @property
    def has_rules(self) -> bool:
        """Some tokens depend on those before them otherwise than through the model."""
        return any(row.sequence.has_rules for row in self.decode_rows)

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def steps(self) -> list[SequenceStep]:
        """What the engine runs: the decode rows, then the prefill chunks."""
        steps = [
            SequenceStep(
                rows=SequenceRows(
                    token_ids=(row.sequence.token_ids[-1], *row.draft_token_ids),
                    start=row.sequence.cached_length,
                    block_table=row.sequence.block_table,
                    num_logits=1 + len(row.draft_token_ids),
                ),
                draft_length=len(row.draft_token_ids),
                sampling=row.sequence.request.sampling,
                base_length=row.sequence.committed_length,
                ruled=row.sequence.ruled,
            )
            for row in self.decode_rows
        ]
        for chunk in self.chunks:
            start = chunk.sequence.cached_length
            steps.append(
                SequenceStep(
                    rows=SequenceRows(
                        token_ids=chunk.sequence.token_ids[start : start + chunk.length],
                        start=start,
                        block_table=chunk.sequence.block_table,
                        num_logits=1 if chunk.is_last else 0,
                    ),
                    draft_length=0,
                    sampling=chunk.sequence.request.sampling if chunk.is_last else None,
                    base_length=chunk.sequence.committed_length,
                    ruled=chunk.sequence.ruled if chunk.is_last else None,
                )
            )
        return steps

    def next_rows(self, places: Sequence[int]) -> list[NextRow]:
        """What the engine runs behind a step without drafts before its verdicts are there: a row
        for each of the decode rows at these places.
        """
        rows = []
        for index in places:
            sequence = self.decode_rows[index].sequence
            length = sequence.committed_length
            rows.append(
                NextRow(
                    index=index,
                    start=length,
                    block_table=sequence.block_table,
                    sampling=sequence.request.sampling,
                    base_length=length + 1,
                )
            )
        return rows

    def judged(self, verdicts: Sequence[Verdict]) -> list[tuple[DecodeRow, Verdict]]:
        """Whom each verdict is about; a prefill chunk that ends its prompt counts as a decode row
        without a draft.
        """
        rows = [
            *self.decode_rows,
            *(
                DecodeRow(sequence=chunk.sequence, draft_token_ids=())
                for chunk in self.chunks
                if chunk.is_last
            ),
        ]
        return list(zip(rows, verdicts, strict=True))
