"""Chooses the form of the loss's costly parts for a device, and tries it before training relies on
it: a form that fails or differs from the plain one is replaced by it, with a note."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Literal

import torch

from training.chain_attention import ChainAttention, flash_attention, plain_attention
from training.loss import Kernels
from training.row_divergence import RowDivergence, plain_row_divergence

KernelChoice = Literal["auto", "fused", "plain"]
# Logits in memory at a time: all of a usual batch on a GPU with the one-pass kernel.
_FUSED_ROWS = 32_768
_PLAIN_BYTES = 64 << 20
# Relative to the plain form in float32, for 16-bit inputs.
_TOLERANCE = 0.03


def choose_kernels(
    device: torch.device,
    dtype: torch.dtype,
    *,
    draft_vocab_size: int,
    choice: KernelChoice,
    note: Callable[[str], None],
) -> Kernels:
    """The fused forms where they work (`auto`), or as asked; raises RuntimeError where `fused` was
    asked for and does not work."""
    plain_rows = max(64, _PLAIN_BYTES // (4 * draft_vocab_size))
    if choice == "plain":
        return Kernels(plain_attention, plain_row_divergence, plain_rows)
    attention: ChainAttention = flash_attention
    failure = _attention_failure(device, dtype)
    if failure is not None:
        attention = plain_attention
        _report("flash attention", failure, choice, note)
    if device.type != "cuda":
        return Kernels(attention, plain_row_divergence, plain_rows)
    divergence, failure = _row_divergence(device, dtype, draft_vocab_size)
    if failure is not None:
        _report("the row kernel", failure, choice, note)
        return Kernels(attention, plain_row_divergence, 8 * plain_rows)
    return Kernels(attention, divergence, _FUSED_ROWS)


def _report(what: str, failure: str, choice: KernelChoice, note: Callable[[str], None]) -> None:
    if choice == "fused":
        raise RuntimeError(f"{what} does not work here: {failure}")
    note(f"{what} does not work here, using the plain form: {failure}")


def _attention_failure(device: torch.device, dtype: torch.dtype) -> str | None:
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> torch.Tensor:
        rows = torch.randn(2, 192, heads, 64, generator=generator).to(device, dtype)
        return rows.transpose(1, 2)

    inputs = [draw(9), draw(9), draw(9), *(draw(3) for _ in range(4))]
    weight = torch.randn(2, 9, 192, 64, generator=generator).to(device)
    results = []
    for form, precision in ((flash_attention, dtype), (plain_attention, torch.float32)):
        given = [one.detach().to(precision).requires_grad_() for one in inputs]
        try:
            out = form(given[0], given[1], given[2], given[3:5], given[5:7])
            grads = torch.autograd.grad((out * weight).sum(), given)
        except (RuntimeError, TypeError, ValueError) as error:
            return str(error)
        results.append([out.detach(), *grads])
    return _difference(results[0], results[1])


def _row_divergence(
    device: torch.device, dtype: torch.dtype, draft_vocab_size: int
) -> tuple[RowDivergence, str | None]:
    if find_spec("triton") is None:
        return plain_row_divergence, "triton is not installed"
    from training.row_kernel import KERNEL_ERRORS, MAX_DRAFT_VOCABULARY, fused_row_divergence

    if draft_vocab_size > MAX_DRAFT_VOCABULARY:
        return plain_row_divergence, f"more than {MAX_DRAFT_VOCABULARY} draft ids"
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 70, draft_vocab_size, generator=generator).mul(3).to(device, dtype)
    weights = torch.rand(70, generator=generator).to(device)
    true_ids = torch.arange(70).sub(1).clamp(max=draft_vocab_size - 1).to(device)
    results = []
    for form in (fused_row_divergence, plain_row_divergence):
        draft = logits[0].clone()
        try:
            rows = form(draft, logits[1], 3, weights, true_ids)
            results.append(
                [rows.divergence.cpu(), rows.true_probability.cpu(), rows.is_correct.cpu(), draft]
            )
        except KERNEL_ERRORS as error:
            return plain_row_divergence, str(error)
    return fused_row_divergence, _difference(results[0], results[1])


def _difference(found: list[torch.Tensor], expected: list[torch.Tensor]) -> str | None:
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        error = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-6)
        if not float(error) < _TOLERANCE:
            return f"result {index} differs by {float(error):.3g} of its size"
    return None
