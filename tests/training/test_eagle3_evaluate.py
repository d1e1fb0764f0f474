"""Dense acceptance against drafting for real: own tokens fed back, true features after a commit."""

import torch
from eagle3_support import (
    SlowDrafter,
    one_batch,
    random_head,
    random_rows,
    random_target,
    random_vocabulary,
)

from training.chain_attention import plain_attention
from training.evaluate import Acceptance, evaluate
from training.head import Head, rotation_of
from training.loss import Kernels, TargetRows, Vocabulary
from training.row_divergence import plain_row_divergence


def slow_acceptance(
    head: Head,
    tokens: list[int],
    answer: int,
    features: torch.Tensor,
    vocabulary: Vocabulary,
    draft_length: int,
) -> list[int]:
    """Accepted length of each draft of one row."""
    target_id = {int(index): id_ for id_, index in enumerate(vocabulary.draft_index)}
    lengths = []
    committed = answer + 1
    while committed < len(tokens):
        drafter = SlowDrafter(head, vocabulary.embedding)
        y = features[0]
        for position in range(committed - 1):
            y = drafter.row(tokens[position + 1], head.fc.weight @ features[position], position)
        draft: list[int] = []
        while True:
            draft.append(target_id[int(drafter.logits(y).argmax())])
            if len(draft) == draft_length:
                break
            y = drafter.row(draft[-1], y, committed - 2 + len(draft))
        accepted = 0
        for proposed, true in zip(draft, tokens[committed:], strict=False):
            if proposed != true:
                break
            accepted += 1
        lengths.append(accepted)
        committed += accepted + 1
    return lengths


@torch.no_grad()
def test_acceptance_equals_drafting_and_verifying_step_by_step() -> None:
    # Tokens that the head itself would draft at places, so that drafts of every length occur.
    rows = random_rows([14, 11, 17], [3, 2, 5], seed=3)
    head = random_head(2)
    vocabulary = random_vocabulary()
    order, batch = one_batch(rows)
    target = random_target(batch)
    _follow_the_head(head, rows.tokens, rows, order, target, vocabulary)
    order, batch = one_batch(rows)
    rotation = rotation_of(
        head.shape, batch.tokens.shape[1] + 5, device=torch.device("cpu"), dtype=torch.float64
    )
    totals = evaluate(
        head.cast(torch.float64),
        [(None, batch)],  # type: ignore[list-item]
        lambda planned, batch: target,
        vocabulary,
        rotation,
        Kernels(plain_attention, plain_row_divergence, 5),
        (2, 4),
    )
    for found, draft_length in zip(totals, (2, 4), strict=True):
        lengths = []
        for place, index in enumerate(order):
            row = rows.row(int(index))
            lengths += slow_acceptance(
                head,
                [int(one) for one in row.tokens],
                row.answer_start,
                target.features[place],
                vocabulary,
                draft_length,
            )
        assert max(lengths) == draft_length
        assert min(lengths) == 0
        assert found == Acceptance(
            draft_length,
            len(lengths),
            sum(lengths),
            tuple(sum(length > k for length in lengths) for k in range(draft_length)),
        )
        assert found.acceptance_length == 1 + sum(lengths) / len(lengths)


def _follow_the_head(head, tokens, rows, order, target: TargetRows, vocabulary) -> None:  # type: ignore[no-untyped-def]
    target_id = {int(index): id_ for id_, index in enumerate(vocabulary.draft_index)}
    for place, index in enumerate(order):
        start, end = int(rows.row_starts[index]), int(rows.row_starts[index + 1])
        at = start + int(rows.answer_starts[index]) + 2
        while at + 4 <= end:
            # A chain of drafts from here, as the row's own next tokens.
            drafter = SlowDrafter(head, vocabulary.embedding)
            y = target.features[place][0]
            for position in range(at - start - 1):
                feature = head.fc.weight @ target.features[place][position]
                y = drafter.row(int(tokens[start + position + 1]), feature, position)
            for offset in range(4):
                token = target_id[int(drafter.logits(y).argmax())]
                tokens[at + offset] = token
                y = drafter.row(token, y, at - start - 1 + offset)
            at += 6
