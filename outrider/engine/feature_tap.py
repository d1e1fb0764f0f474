"""Captures hidden states while a step runs, and keeps the features that they project to.

It knows neither sequences nor who reads the features.
"""

from typing import Protocol

import numpy as np
import torch

from outrider.engine.feature_projection import FeatureProjection
from outrider.engine.feature_store import FeatureStore


class Tap(Protocol):
    """One projection's features of what an engine computes."""

    @property
    def projection(self) -> FeatureProjection: ...

    @property
    def store(self) -> FeatureStore:
        """The features of every token in the engine's cache."""
        ...


class FeatureTap:
    """One projection's tap on a runner's forwards. Owned by the engine's thread.

    Once in use it has to be in every forward: the store takes a row that is marked as written for
    one of the sequence that holds the row's block. What was in between without it needs a new tap.
    """

    def __init__(
        self,
        projection: FeatureProjection,
        store: FeatureStore,
        *,
        hidden_size: int,
        max_rows: int,
        dtype: torch.dtype,
    ) -> None:
        """`max_rows`: of one forward, padding included; `dtype`: of the hidden states."""
        self.projection = projection
        self.store = store
        # Kept between steps: a new one in every step would be pages to clear.
        self._captured = torch.empty(max_rows, len(projection.layer_ids) * hidden_size, dtype=dtype)
        self._parts = {
            layer_id: slice(index * hidden_size, (index + 1) * hidden_size)
            for index, layer_id in enumerate(projection.layer_ids)
        }
        self._num_rows = 0

    def capture(self, layer: int, hidden: torch.Tensor) -> None:
        """[rows, hidden_size], the residual stream entering a decoder layer. It is copied where
        the projection reads it: the decoder adds to it in place.
        """
        part = self._parts.get(layer)
        if part is not None:
            self._num_rows = hidden.shape[0]
            self._captured[: self._num_rows, part].copy_(hidden)

    def keep(self, slots: torch.Tensor, num_tokens: int) -> None:
        """Projects what the last forward captured and stores the features of its first `num_tokens`
        rows at their slots; the rows behind them are padding.
        """
        # All rows, padding included: a product over another number of rows may differ in its bits.
        features = self.projection.project(self._captured[: self._num_rows])
        self.store.write(
            slots[:num_tokens].numpy(),
            features[:num_tokens].view(torch.int16).numpy().view(np.uint16),
        )
