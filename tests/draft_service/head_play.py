"""A target played to an EAGLE-3 drafter: texts, true features, commits; and what the head saw."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from draft_service.drafters.drafter import FeatureRows, Wish
from draft_service.drafters.eagle3 import Eagle3Drafter
from draft_service.drafters.eagle3_sequence import Eagle3Sequence
from outrider.engine.attention.cpu_probe import build_cpu_attention
from outrider.engine.eagle3.head import Eagle3Head
from outrider.engine.eagle3.head_config import read_head_config
from outrider.engine.eagle3.head_runner import HeadOutput, HeadRunner
from outrider.engine.eagle3.head_weights import TargetCheckpoint, load_head
from outrider.engine.kv_cache import BlockPool, KvCache
from outrider.engine.rope import rotation_table
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows
from tests.engine.head_checkpoint import (
    EOS_TOKEN_ID,
    HIDDEN_SIZE,
    MAX_SEQUENCE_LENGTH,
    VOCAB_SIZE,
    HeadFiles,
    MemorySource,
    target_config,
    target_tensors,
)
from tests.engine.head_reference import ReferenceHead

GREEDY = Sampling(temperature=0.0)
NEVER = float("inf")
BLOCK_SIZE = 8
# (rows, seconds) of a forward, as boot would measure them.
STEP_SECONDS = ((1, 0.010), (8, 0.011), (16, 0.014), (64, 0.040))


class RecordingRunner:
    """A HeadRunner that remembers each sequence's logits, by its block table."""

    def __init__(self, runner: HeadRunner) -> None:
        self.runner = runner
        self.head = runner.head
        self.dtype = runner.dtype
        self.block_size = runner.block_size
        self.max_sequence_length = runner.max_sequence_length
        self.max_step_rows = runner.max_step_rows
        self.logits: dict[int, list[np.ndarray]] = {}
        # Rows of each sequence of each forward.
        self.forwards: list[list[int]] = []

    def forward(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> HeadOutput:
        output = self.runner.forward(batch, features)
        self.forwards.append([len(rows.token_ids) for rows in batch])
        drawn = [rows for rows in batch if rows.num_logits]
        for rows, logits in zip(drawn, output.logits, strict=True):
            self.logits.setdefault(id(rows.block_table), []).append(logits)
        return output

    def take_logits(self, state: Eagle3Sequence) -> list[np.ndarray]:
        return self.logits.pop(id(state.block_table), [])


def load_runner(
    files: HeadFiles, directory: Path, *, num_blocks: int = 400, max_step_rows: int = 32
) -> RecordingRunner:
    """The head in float32, as its files describe it."""
    target = target_config()
    config = read_head_config(files.write(directory), target)
    weights = load_head(
        config,
        directory,
        TargetCheckpoint(config=target, source=MemorySource(target_tensors())),
        torch.float32,
    )
    layer = config.layer
    blocks = torch.zeros(1, num_blocks + 1, BLOCK_SIZE * 2 * layer.kv_size)
    cache = KvCache(blocks=blocks, block_size=BLOCK_SIZE)
    rotations = rotation_table(
        layer.head_dim, layer.rope_theta, layer.rope_scaling, MAX_SEQUENCE_LENGTH
    )
    return RecordingRunner(
        HeadRunner(
            head=Eagle3Head(config=config, weights=weights, rotations=rotations),
            attention=build_cpu_attention(layer, cache),
            block_size=BLOCK_SIZE,
            max_sequence_length=MAX_SEQUENCE_LENGTH,
            max_step_rows=max_step_rows,
        )
    )


def drafter_of(
    runner: RecordingRunner, *, num_blocks: int = 400, **settings: object
) -> Eagle3Drafter:
    return Eagle3Drafter(
        runner=runner,
        block_pool=BlockPool(num_blocks + 1),
        eos_token_ids=frozenset([EOS_TOKEN_ID]),
        step_seconds=STEP_SECONDS,
        **settings,
    )


class Played:
    """One sequence of a target: its text, all positions' features, and the drafter's state."""

    def __init__(
        self,
        drafter: Eagle3Drafter,
        seed: int,
        length: int,
        *,
        sampling: Sampling = GREEDY,
        first_feature: int = 0,
    ) -> None:
        self.drafter = drafter
        self.random = np.random.default_rng(seed)
        self.token_ids = array("i", self.random.integers(0, VOCAB_SIZE - 1, length).tolist())
        # As they come over the link.
        self.features = torch.from_numpy(
            self.random.standard_normal((MAX_SEQUENCE_LENGTH, HIDDEN_SIZE)).astype(np.float32)
        ).bfloat16()
        self.first_feature = self.sent = first_feature
        self.sampling = sampling
        self.state = drafter.open(self.token_ids, sampling)
        assert drafter.reserve(self.state, length)

    def rows(self, first: int, end: int) -> FeatureRows:
        rows = self.features[first:end].view(torch.int16).numpy().tobytes()
        return FeatureRows(first_position=first, rows=rows)

    def send(self, end: int | None = None) -> None:
        """The features up to a position, by default all that there are."""
        end = len(self.token_ids) - 1 if end is None else end
        assert self.drafter.add_features(self.state, self.rows(self.sent, end))
        self.sent = end

    def prepare(self, seconds: float = 0.02) -> None:
        while self.drafter.backlog(self.state):
            self.drafter.prepare([self.state], seconds)

    def commit(self, draft: Sequence[int], accepted_length: int, bonus_token_id: int) -> None:
        self.token_ids.extend([*draft[:accepted_length], bonus_token_id])

    def wish(self, draft_length: int, finish_by: float = NEVER) -> Wish[Eagle3Sequence]:
        assert self.drafter.reserve(self.state, len(self.token_ids) + draft_length)
        return Wish(self.state, draft_length, finish_by)

    def propose(self, draft_length: int) -> list[int]:
        return self.drafter.propose([self.wish(draft_length)])[0].token_ids

    def reopen(self, first_feature: int) -> None:
        """The target opens it again, with features from a position on."""
        self.drafter.close(self.state)
        self.state = self.drafter.open(self.token_ids, self.sampling)
        assert self.drafter.reserve(self.state, len(self.token_ids))
        self.first_feature = self.sent = first_feature

    def expected(self, reference: ReferenceHead, draft: Sequence[int]) -> list[np.ndarray]:
        first = self.state.first_position
        true = self.features[first : len(self.token_ids) - 1].float()
        return reference.draft_logits(self.token_ids, true, first, draft)


def largest_error(found: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> float:
    """Relative to the largest logit of each row."""
    assert len(found) == len(wanted), (len(found), len(wanted))
    return max(
        float(np.abs(left - right).max() / np.abs(right).max())
        for left, right in zip(found, wanted, strict=True)
    )
