"""What the steps of an engine on a GPU are made for, and the shapes that graphs are captured of."""

from dataclasses import dataclass

from outrider.engine.first_decode import NUM_DECODED
from outrider.engine.gpu.buckets import sequence_buckets


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """What steps are made for."""

    block_size: int
    max_sequence_length: int
    max_step_rows: int
    max_sequences: int
    max_draft_length: int

    @property
    def max_pages_each(self) -> int:
        """Blocks of the longest sequence, with the rows that fill a rectangle up."""
        return -(-(self.max_sequence_length + 1 + self.max_draft_length) // self.block_size)

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """(sequences, rows of each) of every graph, largest first: all that a step within
        max_step_rows may round up to.
        """
        return sorted(
            (
                (count, rows)
                for count, least in self.fewest_sequences.items()
                for rows in range(1, self.max_draft_length + 2)
                if least * rows <= self.max_step_rows
            ),
            key=lambda bucket: -bucket[0] * bucket[1],
        )

    @property
    def fewest_sequences(self) -> dict[int, int]:
        """By a graph's number of sequences: the smallest number of them that is its to run."""
        counts = sequence_buckets(self.max_sequences)
        return dict(zip(counts, (1, *(count + 1 for count in counts[:-1])), strict=True))

    @property
    def most_rows(self) -> int:
        """Of a step, padding included."""
        return max(self.max_step_rows, *(count * rows for count, rows in self.buckets))

    @property
    def most_logits(self) -> int:
        """Rows of logits of a step, padding included; the first decode looks at more than some
        engines' requests do.
        """
        return max(self.max_sequences * (1 + self.max_draft_length), NUM_DECODED + 1)
