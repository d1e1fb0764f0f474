"""Plain operations by their definition; own kernels against them where there is a GPU."""

import pytest
import torch

from training.decode_attention import checked_triton_attention, matmul_attention
from training.token_choice import checked_kernel_choice, plain_choice


def test_matmul_attention_reads_each_row_only_to_its_length() -> None:
    torch.manual_seed(0)
    cache = torch.randn(2, 3, 2, 20, 16)
    q = torch.randn(3, 6, 16)
    lengths = torch.tensor([1, 7, 20])
    found = matmul_attention(q, cache[0], cache[1], lengths)
    for row, length in enumerate([1, 7, 20]):
        keys, values = (part[row, :, :length].repeat_interleave(3, 0) for part in cache)
        wanted = torch.nn.functional.scaled_dot_product_attention(q[row].unsqueeze(1), keys, values)
        torch.testing.assert_close(found[row], wanted.flatten())


def test_plain_choice_is_greedy_at_zero_and_stays_within_its_margin() -> None:
    torch.manual_seed(0)
    logits = torch.randn(600, 50)
    temperatures = torch.ones(600, 1)
    temperatures[:300] = 0
    margins = torch.full((600, 1), -0.5)
    chosen = plain_choice(logits, temperatures, margins, torch.zeros(1, dtype=torch.long))
    behind = logits.amax(1) - logits.gather(1, chosen.unsqueeze(1)).squeeze(1)
    assert float(behind[:300].max()) == 0
    assert 0 < float(behind[300:].max()) <= 0.5


@pytest.mark.gpu
def test_kernels_agree_with_plain_torch_on_the_gpu() -> None:
    pytest.importorskip("triton")
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    from tests.engine.engine_support import default_model_path
    from training.target import load_target

    target = load_target(default_model_path(), dtype=torch.bfloat16, device="cuda")
    checked_triton_attention(target.config, target.embedding)
    checked_kernel_choice(target.embedding)
