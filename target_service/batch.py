"""One step's rows: the ragged forward for them, and the verdict on each sequence's draft."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.acceptance import Verdict, verify
from outrider.engine.feature_tap import FeatureTap
from outrider.engine.runner import Runner, SequenceRows
from outrider.engine.sampling import sample
from target_service.scheduler import PrefillChunk
from target_service.sequence import Sequence as TokenSequence

Logits = npt.NDArray[np.float32]


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

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    def forward(self, runner: Runner, tap: FeatureTap | None) -> Logits:
        """One ragged forward, captured by the tap. Returns float32 [rows with logits, vocab]: the
        verify rows of every decode row, then the last rows of the prefill chunks that end their
        prompts.
        """
        rows = [
            SequenceRows(
                token_ids=(row.sequence.token_ids[-1], *row.draft_token_ids),
                start=row.sequence.cached_length,
                block_table=row.sequence.block_table,
                num_logits=1 + len(row.draft_token_ids),
            )
            for row in self.decode_rows
        ]
        for chunk in self.chunks:
            start = chunk.sequence.cached_length
            rows.append(
                SequenceRows(
                    token_ids=chunk.sequence.token_ids[start : start + chunk.length],
                    start=start,
                    block_table=chunk.sequence.block_table,
                    num_logits=1 if chunk.is_last else 0,
                )
            )
        return runner.forward(rows, tap)

    def verdicts(self, logits: Logits) -> list[tuple[DecodeRow, Verdict]]:
        """The verdict on every sequence that has logits, in their order; a prefill chunk that ends
        its prompt counts as a decode row without a draft.
        """
        rows = [
            *self.decode_rows,
            *(
                DecodeRow(sequence=chunk.sequence, draft_token_ids=())
                for chunk in self.chunks
                if chunk.is_last
            ),
        ]
        verdicts = []
        first = 0
        for row in rows:
            count = 1 + len(row.draft_token_ids)
            verdicts.append((row, _verdict(row, logits[first : first + count])))
            first += count
        return verdicts


def _verdict(row: DecodeRow, logits: Logits) -> Verdict:
    """`logits` [1 + draft length, vocab]: row i follows the first i draft tokens."""
    sampling = row.sequence.request.sampling
    base_length = row.sequence.committed_length
    return verify(
        row.draft_token_ids, lambda index: sample(logits[index], sampling, base_length + index)
    )
