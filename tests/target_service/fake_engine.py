"""A model whose logits are a hash of the whole prefix, read back through the block table.

Whatever the step loop gets wrong about positions, blocks or rollback changes its tokens.
"""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch

from outrider.engine.cpu_steps import CpuStep
from outrider.engine.feature_projection import FeatureProjection
from outrider.engine.feature_store import FeatureStore
from outrider.engine.feature_tap import FeatureTap, Tap
from outrider.engine.runner import SequenceRows
from outrider.engine.sampling import Sampling, sample
from outrider.engine.verify_step import SequenceStep

VOCAB_SIZE = 24
HIDDEN_SIZE = 4


def logits_of(prefix: Sequence[int]) -> np.ndarray:
    """float32 [vocab]: next-token logits behind a prefix."""
    digest = hashlib.blake2b(np.asarray(prefix, dtype="<i4").tobytes(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    return generator.normal(scale=2.0, size=VOCAB_SIZE).astype(np.float32)


def oracle(
    prompt: Sequence[int], sampling: Sampling, max_tokens: int, stops: frozenset[int] = frozenset()
) -> list[int]:
    """The output that any schedule must give."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(sample(logits_of(tokens), sampling, len(tokens)))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def hidden_state_of(prefix: Sequence[int], layer: int) -> torch.Tensor:
    """float32 [HIDDEN_SIZE]: what enters a layer at the last token of a prefix."""
    digest = hashlib.blake2b(np.asarray([layer, *prefix], dtype="<i4").tobytes(), digest_size=8)
    generator = np.random.default_rng(int.from_bytes(digest.digest(), "little"))
    return torch.from_numpy(generator.normal(size=HIDDEN_SIZE).astype(np.float32))


def features_of(tokens: Sequence[int], projection: FeatureProjection, first: int) -> np.ndarray:
    """uint16 [tokens - first, width]: the features of the positions from `first` on."""
    captured = torch.stack(
        [
            torch.cat([hidden_state_of(tokens[: at + 1], layer) for layer in projection.layer_ids])
            for at in range(first, len(tokens))
        ]
    )
    return projection.project(captured).view(torch.int16).numpy().view(np.uint16)


class FakeSteps:
    """Stands in for a StepEngine: the CPU's drawing over a FakeRunner's logits."""

    def __init__(self, runner: "FakeRunner", *, runs_beside_host: bool = False) -> None:
        self.runner = runner
        self.runs_beside_host = runs_beside_host

    def launch(self, sequences: Sequence[SequenceStep], tap: Tap | None) -> CpuStep:
        assert tap is None or isinstance(tap, FeatureTap)
        logits = self.runner.forward([sequence.rows for sequence in sequences], tap)
        return CpuStep(sequences=sequences, logits=logits)

    def make_tap(self, data: bytes) -> Tap:
        raise NotImplementedError("the tests make taps themselves")


class FakeRunner:
    """Stands in for outrider.engine.runner.Runner."""

    def __init__(self, block_size: int, max_step_rows: int) -> None:
        self._block_size = block_size
        self._max_step_rows = max_step_rows
        self._cache: dict[tuple[int, int], int] = {}
        self.rows_of_steps: list[list[int]] = []

    def make_tap(self, projection: FeatureProjection, num_blocks: int) -> FeatureTap:
        store = FeatureStore(
            num_blocks=num_blocks, block_size=self._block_size, width=projection.width
        )
        return FeatureTap(
            projection, store, hidden_size=HIDDEN_SIZE, max_rows=self._max_step_rows,
            dtype=torch.float32,
        )  # fmt: skip

    def forward(self, batch: Sequence[SequenceRows], tap: FeatureTap | None = None) -> np.ndarray:
        assert sum(len(rows.token_ids) for rows in batch) <= self._max_step_rows
        self.rows_of_steps.append([len(rows.token_ids) for rows in batch])
        logits = []
        prefixes: list[list[int]] = []
        slots: list[int] = []
        for rows in batch:
            for index, token_id in enumerate(rows.token_ids):
                self._cache[self._place(rows, rows.start + index)] = token_id
            end = rows.start + len(rows.token_ids)
            places = range(rows.start, end)
            if tap is not None:
                prefixes += [
                    [self._cache[self._place(rows, at)] for at in range(last + 1)]
                    for last in places
                ]
                slots += [self._slot(rows, at) for at in places]
            for position in range(end - rows.num_logits, end):
                prefix = [self._cache[self._place(rows, at)] for at in range(position + 1)]
                logits.append(logits_of(prefix))
        if tap is not None:
            # Layer 0 is one that nobody asked for.
            for layer in (0, *tap.projection.layer_ids):
                tap.capture(
                    layer, torch.stack([hidden_state_of(prefix, layer) for prefix in prefixes])
                )
            tap.keep(torch.tensor(slots), len(slots))
        return np.stack(logits) if logits else np.zeros((0, VOCAB_SIZE), np.float32)

    def _place(self, rows: SequenceRows, position: int) -> tuple[int, int]:
        return rows.block_table[position // self._block_size], position % self._block_size

    def _slot(self, rows: SequenceRows, position: int) -> int:
        block, offset = self._place(rows, position)
        return block * self._block_size + offset
