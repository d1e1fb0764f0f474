"""Projects what a step captured, on the device, and keeps the features on the host.

The captured streams are those of the engine's feature layers, whichever of them the projection
reads: graphs were captured before it was known.
"""

from dataclasses import dataclass
from itertools import cycle

import numpy as np
import numpy.typing as npt
import torch

from outrider.engine.errors import CheckpointError
from outrider.engine.feature_projection import FeatureProjection
from outrider.engine.feature_store import FeatureStore
from outrider.engine.gpu.decoder import Capture

# A step that runs, and one that was launched behind it.
MOST_RUNNING = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningFeatures:
    """A step's features on their way to the host."""

    rows: torch.Tensor  # pinned [rows, width]
    store: FeatureStore

    def keep(self, rows: npt.NDArray[np.int64], slots: npt.NDArray[np.int64]) -> None:
        """Stores the features of these rows, which have come, at their slots."""
        features = self.rows.view(torch.int16).numpy().view(np.uint16)
        self.store.write(slots, features[rows])


class GpuFeatureTap:
    """One projection's tap on an engine's steps. Owned by the engine's thread once in use."""

    def __init__(
        self,
        projection: FeatureProjection,
        store: FeatureStore,
        capture: Capture,
        *,
        hidden_size: int,
    ) -> None:
        """Raises CheckpointError for layers that the engine does not capture."""
        missing = sorted(set(projection.layer_ids) - set(capture.layer_ids))
        if missing:
            raise CheckpointError(
                f"feature projection reads layer {missing[0]}: must be among those captured, "
                f"{', '.join(map(str, capture.layer_ids))}"
            )
        self.projection = projection
        self.store = store
        self._captured = capture.rows
        self._parts = [
            slice(first, first + hidden_size)
            for first in (
                capture.layer_ids.index(layer) * hidden_size for layer in projection.layer_ids
            )
        ]
        self._takes_all = projection.layer_ids == capture.layer_ids
        self._host_rows = cycle(
            [
                torch.empty(
                    len(capture.rows), projection.width, dtype=projection.row_dtype, pin_memory=True
                )
                for _ in range(MOST_RUNNING)
            ]
        )

    def launch(self, num_rows: int) -> RunningFeatures:
        """Projects the first rows of what was captured, and starts their way to the host."""
        captured = self._captured[:num_rows]
        if not self._takes_all:
            captured = torch.cat([captured[:, part] for part in self._parts], dim=1)
        rows = next(self._host_rows)[:num_rows]
        rows.copy_(self.projection.project(captured), non_blocking=True)
        return RunningFeatures(rows=rows, store=self.store)
