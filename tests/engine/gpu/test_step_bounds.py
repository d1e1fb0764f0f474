"""Which graphs there are: one for every step that may come, without a GPU."""

import pytest

from outrider.engine.gpu.step_bounds import StepBounds


def bounds_of(max_sequences: int, max_draft_length: int, max_step_rows: int) -> StepBounds:
    return StepBounds(
        block_size=32,
        max_sequence_length=500,
        max_step_rows=max_step_rows,
        max_sequences=max_sequences,
        max_draft_length=max_draft_length,
    )


@pytest.mark.parametrize("max_sequences", [1, 3, 8, 64, 100, 256])
@pytest.mark.parametrize("max_draft_length", [0, 3, 5, 32])
@pytest.mark.parametrize("max_step_rows", [256, 512, 2048])
def test_every_step_within_the_bounds_has_a_graph_and_every_graph_a_step(
    max_sequences: int, max_draft_length: int, max_step_rows: int
) -> None:
    bounds = bounds_of(max_sequences, max_draft_length, max_step_rows)
    buckets = bounds.buckets
    counts = sorted({count for count, _ in buckets})
    needed = {
        (next(count for count in counts if count >= sequences), rows)
        for sequences in range(1, max_sequences + 1)
        for rows in range(1, max_draft_length + 2)
        if sequences * rows <= max_step_rows
    }
    assert set(buckets) == needed
    assert len(buckets) == len(set(buckets))
    sizes = [count * rows for count, rows in buckets]
    assert sizes == sorted(sizes, reverse=True)
    assert bounds.most_rows >= max(sizes)
    for count, fewest in bounds.fewest_sequences.items():
        if count in counts:
            assert next(one for one in counts if one >= fewest) == count
            assert fewest == 1 or next(one for one in counts if one >= fewest - 1) < count


def test_logits_are_those_of_all_sequences_with_whole_drafts_or_of_the_first_decode() -> None:
    assert bounds_of(64, 5, 512).most_logits == 384
    assert bounds_of(1, 0, 512).most_logits == 5
