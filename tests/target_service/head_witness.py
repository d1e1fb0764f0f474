"""An EAGLE-3 drafter whose head sees through everything: the real drafter, sequences and cache over
a head that knows which text each row is of, and draws the fake model's own next token.

A true feature is a hash of the text before it, so the head finds the text by the feature. It checks
that the cache holds, row by row, what a fresh drafter that was given the committed tokens would
have put there.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace

import numpy as np
import torch
from fake_engine import HIDDEN_SIZE, VOCAB_SIZE, features_of, logits_of

from draft_service.drafters.eagle3 import Eagle3Drafter
from outrider.engine.eagle3.head_runner import HeadOutput
from outrider.engine.feature_projection import FeatureProjection
from outrider.engine.kv_cache import BlockPool
from outrider.engine.step import SequenceRows

BLOCK_SIZE = 8
MAX_SEQUENCE_LENGTH = 1000
Text = tuple[int, ...]


class Texts:
    """Texts by the feature of their last token."""

    def __init__(self, projection: FeatureProjection) -> None:
        self.projection = projection
        self._by_feature: dict[bytes, Text] = {}
        self._lengths: dict[Text, int] = {}
        self._own: list[Text] = []

    def add(self, text: Text) -> None:
        """A whole text that a target may come to have."""
        for at, row in enumerate(features_of(text, self.projection, 0)):
            self._by_feature[_decoded(row)] = text[: at + 1]

    def own_feature(self, text: Text) -> torch.Tensor:
        """The head's own output behind a text."""
        self._own.append(text)
        # A number that no projected row of this width is made of alone.
        feature = torch.zeros(self.projection.width)
        feature[0] = len(self._own)
        return feature

    def find(self, feature: torch.Tensor) -> Text | None:
        """The text, or None for a row that is no feature."""
        if not feature[1:].any() and 0 < feature[0] <= len(self._own):
            return self._own[int(feature[0]) - 1]
        return self._by_feature.get(feature.numpy().tobytes())


class WitnessRunner:
    """Stands in for a HeadRunner. `object_to` hears of everything that is not as it should be."""

    dtype = torch.float32
    block_size = BLOCK_SIZE
    max_sequence_length = MAX_SEQUENCE_LENGTH
    max_step_rows = 32

    def __init__(self, texts: Texts, object_to: Callable[[str], None]) -> None:
        self._texts = texts
        self._object_to = object_to
        projection = texts.projection
        self.head = SimpleNamespace(
            config=SimpleNamespace(
                hidden_size=projection.width,
                target_hidden_size=HIDDEN_SIZE,
                feature_layers=SimpleNamespace(inputs=projection.layer_ids),
            ),
            weights=SimpleNamespace(
                row_dtype=projection.row_dtype,
                fingerprint="witness",
                projection=b"",
                target_token_ids=None,
            ),
        )
        self._cache: dict[int, Text] = {}

    def forward(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> HeadOutput:
        logits, outputs = [], []
        rows = iter(features)
        for sequence in batch:
            text: Text = ()
            for at, token_id in enumerate(sequence.token_ids, sequence.start):
                text = self._run_row(sequence, at, token_id, next(rows))
            if sequence.num_logits:
                self._check_cache(sequence, text)
            for length in range(len(text) - sequence.num_logits + 1, len(text) + 1):
                logits.append(logits_of(text[:length]))
                outputs.append(self._texts.own_feature(text[:length]))
        if not logits:
            return HeadOutput(np.empty((0, VOCAB_SIZE), np.float32), torch.empty(0, 0))
        return HeadOutput(np.stack(logits), torch.stack(outputs))

    def _run_row(
        self, sequence: SequenceRows, at: int, token_id: int, feature: torch.Tensor
    ) -> Text:
        before = self._texts.find(feature)
        position = at + sequence.position_offset
        if before is None or len(before) != position + 1:
            self._object_to(f"the feature of position {position} is one of {before}")
            before = ()
        text = (*before, token_id)
        self._cache[self._slot(sequence, at)] = text
        return text

    def _check_cache(self, sequence: SequenceRows, text: Text) -> None:
        """What the last row attends to."""
        for at in range(sequence.start + len(sequence.token_ids)):
            cached = self._cache.get(self._slot(sequence, at))
            wanted = text[: at + sequence.position_offset + 2]
            if cached != wanted:
                self._object_to(f"behind {wanted}, the cache has {cached}")

    def _slot(self, sequence: SequenceRows, at: int) -> int:
        return sequence.block_table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE


def witness_drafter(
    texts: Texts, pool: BlockPool, object_to: Callable[[str], None], clock: Callable[[], float]
) -> Eagle3Drafter:
    return Eagle3Drafter(
        runner=WitnessRunner(texts, object_to),
        block_pool=pool,
        eos_token_ids=frozenset(),
        step_seconds=((1, 1e-5), (32, 1e-5)),
        clock=clock,
    )


def _decoded(row: np.ndarray) -> bytes:
    """As the drafter decodes a bfloat16 row, in bytes."""
    return torch.from_numpy(row.view(np.int16)).view(torch.bfloat16).float().numpy().tobytes()
