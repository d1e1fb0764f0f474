"""Tokens drawn by the sampling kernels against the host's, and the acceptance of drafts."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from outrider.engine.noise import gumbel
from outrider.engine.sampling import LogitsError, Sampling, sample, sample_among
from tests.engine.test_noise import GOLDEN

# What the interpreter's numpy warns of is meant: integers modulo 2**64, and -inf as a score.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TEMPERATURES = [0.0, 1e-3, 0.3, 0.7, 1.0, 1.3, 50.0]
SEEDS = [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]


def drawn(
    device: torch.device,
    logits: torch.Tensor,
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
    temperatures: NDArray[np.float64],
    token_ids: NDArray[np.int64] | None = None,
) -> list[int]:
    from outrider.engine.gpu.sampling_kernel import sample_rows, sampling_workspace

    out = torch.full((len(logits),), -7, dtype=torch.int32, device=device)
    sample_rows(
        logits.to(device),
        torch.from_numpy(seeds.view(np.int64)).to(device),
        torch.from_numpy(positions).to(device),
        torch.from_numpy(temperatures).to(device),
        out,
        sampling_workspace(len(logits), device),
        None if token_ids is None else torch.from_numpy(token_ids.astype(np.int32)).to(device),
    )
    return out.tolist()


def drawn_by_the_host(
    logits: torch.Tensor,
    seeds: NDArray[np.uint64],
    positions: NDArray[np.int32],
    temperatures: NDArray[np.float64],
    token_ids: NDArray[np.int64] | None = None,
) -> list[int]:
    tokens = []
    rows = logits.float().numpy()
    for row, seed, position, temperature in zip(rows, seeds, positions, temperatures, strict=True):
        sampling = Sampling(temperature=float(temperature), seed=int(seed))
        try:
            if token_ids is None:
                tokens.append(sample(row, sampling, int(position)))
            else:
                index = sample_among(row, token_ids, sampling, int(position))
                tokens.append(int(token_ids[index]))
        except LogitsError:
            tokens.append(-1)
    return tokens


def some_logits(rows: int, vocabulary: int) -> torch.Tensor:
    """Random rows, some of them flat, full of ties, or mostly -inf; the last three without a finite
    largest logit."""
    random = np.random.default_rng(vocabulary)
    logits = (random.normal(size=(rows, vocabulary)) * 3).astype(np.float32)
    logits[0:4] = 0.0
    logits[4:8] = np.round(logits[4:8])
    logits[8:12, 1:] = -np.inf
    logits[12:16, : vocabulary // 2] = -np.inf
    logits[-3, vocabulary // 3] = np.nan
    logits[-2] = -np.inf
    logits[-1, vocabulary - 1] = np.inf
    return torch.from_numpy(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocabulary", [2, 1000, 40_001])
@pytest.mark.parametrize("has_ids", [False, True], ids=["whole vocabulary", "draft vocabulary"])
def test_every_row_yields_the_hosts_token(
    kernel_device: torch.device, dtype: torch.dtype, vocabulary: int, has_ids: bool
) -> None:
    random = np.random.default_rng(vocabulary + has_ids)
    rows = 42
    logits = some_logits(rows, vocabulary).to(dtype)
    ids = np.sort(random.choice(152_000, vocabulary, replace=False)) if has_ids else None
    seeds = np.resize(np.array(SEEDS, dtype=np.uint64), rows)
    seeds[18:] = random.integers(0, 2**64, size=rows - 18, dtype=np.uint64)
    positions = random.integers(0, 131_072, size=rows).astype(np.int32)
    temperatures = np.resize(np.array(TEMPERATURES), rows)
    wanted = drawn_by_the_host(logits, seeds, positions, temperatures, ids)
    assert drawn(kernel_device, logits, seeds, positions, temperatures, ids) == wanted
    assert wanted[-3:] == [-1, -1, -1] and -1 not in wanted[:-3]


@pytest.mark.parametrize("kind", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_row_without_a_finite_largest_logit_yields_no_token(
    kernel_device: torch.device, kind: float, temperature: float
) -> None:
    random = np.random.default_rng(0)
    logits = torch.from_numpy(random.normal(size=(3, 5000)).astype(np.float32))
    if kind == -math.inf:
        logits[1] = kind
    else:
        logits[1, 4321] = kind
    found = drawn(
        kernel_device,
        logits,
        np.zeros(3, dtype=np.uint64),
        np.zeros(3, dtype=np.int32),
        np.full(3, temperature),
    )
    assert found[1] == -1 and min(found[0], found[2]) >= 0


@pytest.mark.parametrize("point", GOLDEN)
def test_the_kernels_noise_is_the_golden_noise(
    kernel_device: torch.device, point: tuple[int, int, int]
) -> None:
    """Of two tokens the second wins at temperature 1 exactly where its logit makes up for the
    difference of their noises, here by one part in a million on either side."""
    seed, position, token_id = point
    rival = 7
    ids = np.array(sorted((token_id, rival)), dtype=np.int64)
    noise = {rival: float(gumbel(seed, position, np.array([rival]))[0])}
    noise[token_id] = float.fromhex(GOLDEN[point][3])
    gap = noise[rival] - noise[token_id]
    for slack, winner in [(1e-6, token_id), (-1e-6, rival)]:
        logits = torch.zeros(1, 2)
        logits[0, int(np.flatnonzero(ids == token_id)[0])] = gap + slack * max(1.0, abs(gap))
        found = drawn(
            kernel_device,
            logits,
            np.array([seed], dtype=np.uint64),
            np.array([position], dtype=np.int32),
            np.ones(1),
            ids,
        )
        assert found == [winner]


def test_drafts_are_accepted_up_to_the_first_that_differs(kernel_device: torch.device) -> None:
    from outrider.engine.gpu.sampling_kernel import accept

    num_drawn = 4
    drawn_tokens = [[5, 6, 7, 8]] * 7
    drafts = [
        [5, 6, 7, 0],  # all equal
        [5, 0, 7, 0],  # equal again after a difference: does not count
        [0, 6, 7, 0],
        [5, 6, 7, 0],  # as long as its length says
        [5, 6, 7, 0],
        [5, 6, 0, 0],
        [5, 6, 7, 8],  # the place behind the last draft is no draft
    ]
    lengths = [3, 3, 3, 2, 0, 3, 3]
    out = torch.full((7,), -1, dtype=torch.int32, device=kernel_device)
    accept(
        torch.tensor(drafts, dtype=torch.int32, device=kernel_device).flatten(),
        torch.tensor(drawn_tokens, dtype=torch.int32, device=kernel_device).flatten(),
        torch.tensor(lengths, dtype=torch.int32, device=kernel_device),
        out,
        num_drawn,
    )
    assert out.tolist() == [3, 1, 0, 2, 0, 2, 3]
