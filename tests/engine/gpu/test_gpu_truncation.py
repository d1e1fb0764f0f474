"""Truncation on whole batches of a device, here the CPU, against the host's rule by rule."""

import numpy as np
import pytest
import torch

from outrider.engine.gpu.truncation import truncate_
from outrider.engine.truncation import kept_token_ids


def numbers(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("digits", [1, 5], ids=["many ties", "few ties"])
def test_what_stays_is_what_the_host_keeps(digits: int) -> None:
    random = np.random.default_rng(digits)
    rows = 300
    logits = np.round(random.normal(size=(rows, 40)) * 3, digits).astype(np.float32)
    logits[:20, 5:] = -np.inf
    logits[20:40] = 1.0
    temperatures = random.choice([0.3, 1.0, 2.0], size=rows)
    top_k = random.choice([0, 1, 5, 39, 100], size=rows)
    top_p = random.choice([1.0, 0.9, 0.01, 0.5], size=rows)
    min_p = random.choice([0.0, 0.1, 1.0], size=rows)
    found = torch.from_numpy(logits.copy())
    truncate_(
        found,
        numbers(temperatures.tolist()),
        torch.from_numpy(top_k),
        numbers(top_p.tolist()),
        numbers(min_p.tolist()),
    )
    for row in range(rows):
        kept = kept_token_ids(
            logits[row],
            int(logits[row].argmax()),
            temperature=float(temperatures[row]),
            top_k=int(top_k[row]),
            top_p=float(top_p[row]),
            min_p=float(min_p[row]),
        )
        kept = [token for token in kept.tolist() if np.isfinite(logits[row, token])]
        assert found[row].isfinite().nonzero()[:, 0].tolist() == kept, row


def test_greedy_rows_and_rows_without_truncation_stay_as_they_are() -> None:
    logits = torch.randn(2, 30)
    found = logits.clone()
    truncate_(
        found, numbers([0.0, 0.7]), torch.tensor([3, 0]), numbers([0.5, 1.0]), numbers([0.9, 0.0])
    )
    assert torch.equal(found, logits)
