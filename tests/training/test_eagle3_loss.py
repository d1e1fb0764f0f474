"""The unrolled loss against drafting chain by chain, with its gradients; kernels against plain."""

import pytest
import torch
from eagle3_support import (
    SlowDrafter,
    one_batch,
    random_head,
    random_rows,
    random_target,
    random_vocabulary,
)

from training.batches import Batch
from training.chain_attention import ChainAttention, flash_attention, plain_attention
from training.head import Head, rotation_of
from training.loss import Kernels, TargetRows, Vocabulary, unrolled_steps
from training.row_divergence import plain_row_divergence

STEPS = 4


def fast_losses(
    head: Head, batch: Batch, attention: ChainAttention, max_rows: int = 7
) -> tuple[torch.Tensor, torch.Tensor]:
    rotation = rotation_of(
        head.shape, batch.tokens.shape[1] + STEPS, device=torch.device("cpu"), dtype=torch.float64
    )
    outcomes = list(
        unrolled_steps(
            head.cast(torch.float64),
            batch,
            random_target(batch),
            random_vocabulary(),
            rotation,
            Kernels(attention, plain_row_divergence, max_rows),
            STEPS,
        )
    )
    return (
        torch.stack([outcome.loss for outcome in outcomes]),
        torch.stack([outcome.is_correct for outcome in outcomes]),
    )


def slow_losses(
    head: Head,
    rows_tokens: list[list[int]],
    answers: list[int],
    target: TargetRows,
    vocabulary: Vocabulary,
) -> tuple[torch.Tensor, dict[tuple[int, int, int], float]]:
    """Loss of each step, and correctness by (row, chain, step), one chain after the other."""
    total = [torch.zeros((), dtype=torch.float64) for _ in range(STEPS)]
    weight_sums = [0.0] * STEPS
    correct = {}
    for row, (tokens, answer) in enumerate(zip(rows_tokens, answers, strict=True)):
        features = [head.fc.weight @ one for one in target.features[row]]
        for chain in range(max(answer - 2, 0), len(tokens) - 2):
            drafter = SlowDrafter(head, vocabulary.embedding)
            reached = 1.0
            y = features[0]
            for position in range(chain + 1):
                y = drafter.row(tokens[position + 1], features[position], position)
            for step in range(STEPS):
                predicted = chain + step + 2
                if predicted >= len(tokens):
                    break
                if step > 0:
                    y = drafter.row(tokens[chain + step + 1], y, chain + step)
                log_draft = torch.log_softmax(drafter.logits(y), 0)
                hidden = target.final_hidden[row, predicted - 1]
                log_target = torch.log_softmax(vocabulary.draft_rows @ hidden, 0)
                divergence = (log_target.exp() * (log_target - log_draft)).sum()
                true_id = int(vocabulary.draft_index[tokens[predicted]])
                correct[row, chain, step] = float(int(log_draft.argmax()) == true_id)
                if true_id < 0:
                    break
                total[step] = total[step] + reached * divergence
                weight_sums[step] += reached
                reached *= float(log_draft[true_id].detach().exp())
    return torch.stack(
        [one / weight for one, weight in zip(total, weight_sums, strict=True)]
    ), correct


@pytest.mark.parametrize("attention", [plain_attention, flash_attention])
def test_unrolled_loss_and_gradients_equal_drafting_chain_by_chain(
    attention: ChainAttention,
) -> None:
    rows = random_rows([9, 12, 4, 2], [3, 0, 3, 1])
    order, batch = one_batch(rows)
    fast_head, slow_head = random_head(), random_head()
    losses, correct = fast_losses(fast_head, batch, attention)
    answers = [int(rows.answer_starts[index]) for index in order]
    tokens = [[int(one) for one in rows.row(int(index)).tokens] for index in order]
    expected, expected_correct = slow_losses(
        slow_head, tokens, answers, random_target(batch), random_vocabulary()
    )
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-7)
    width = batch.tokens.shape[1]
    chains = {int(chain): n for n, chain in enumerate(batch.chains)}
    assert len(chains) == len({(row, chain) for row, chain, _ in expected_correct})
    for (row, chain, step), value in expected_correct.items():
        assert float(correct[step, chains[row * width + chain]]) == value

    weights = torch.tensor([1.0, 0.7, 2.0, 0.3], dtype=torch.float64)
    (losses * weights).sum().backward()  # type: ignore[no-untyped-call]
    (expected * weights).sum().backward()  # type: ignore[no-untyped-call]
    for (name, fast), slow in zip(
        fast_head.named_parameters(), slow_head.parameters(), strict=True
    ):
        assert fast.grad is not None and slow.grad is not None
        torch.testing.assert_close(
            fast.grad, slow.grad, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: name + text
        )


def test_later_steps_alone_reach_the_projection_of_features() -> None:
    _, batch = one_batch(random_rows([9, 12], [3, 0]))
    head = random_head()
    losses, _ = fast_losses(head, batch, flash_attention)
    losses[STEPS - 1].backward()  # type: ignore[no-untyped-call]
    assert head.fc.weight.grad is not None
    assert float(head.fc.weight.grad.abs().max()) > 1e-4


def test_step_loss_does_not_depend_on_how_many_rows_are_taken_at_a_time() -> None:
    _, batch = one_batch(random_rows([9, 12], [3, 0]))
    one, _ = fast_losses(random_head(), batch, plain_attention, max_rows=1)
    many, _ = fast_losses(random_head(), batch, plain_attention, max_rows=1000)
    torch.testing.assert_close(one, many)


def test_flash_attention_equals_plain_in_bfloat16() -> None:
    generator = torch.Generator().manual_seed(3)

    def draw(heads: int) -> torch.Tensor:
        size = (2, 70, heads, 16)
        return torch.randn(size, generator=generator).bfloat16().transpose(1, 2).requires_grad_()

    inputs = [draw(4), draw(4), draw(4), draw(2), draw(2), draw(2), draw(2)]
    weight = torch.randn(2, 4, 70, 16, generator=generator)
    results = []
    for form, dtype in ((flash_attention, torch.bfloat16), (plain_attention, torch.float64)):
        given = [one.detach().to(dtype).requires_grad_() for one in inputs]
        out = form(given[0], given[1], given[2], given[3:5], given[5:7])
        (out * weight.to(dtype)).sum().backward()  # type: ignore[no-untyped-call]
        results.append([out, *(one.grad for one in given)])
    for fast, exact in zip(*results, strict=True):
        assert fast is not None and exact is not None
        error = (fast.double() - exact).detach().norm() / exact.detach().norm()
        assert float(error) < 0.01
