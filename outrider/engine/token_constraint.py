"""What a grammar is to the engine: which tokens may follow an output."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt


class TokenConstraint(Protocol):
    """One sequence's. Belongs to the engine's thread."""

    @property
    def failure(self) -> str | None:
        """Why it cannot follow the output that it was asked about last; the sequence has to end."""

    def forced(self, output: Sequence[int]) -> Sequence[int]:
        """Tokens behind `output` that have no alternative, as far as they are known; maybe none."""

    def allowed(self, output: Sequence[int]) -> npt.NDArray[np.bool_]:
        """bool [vocab], never all False: the tokens that may follow `output`, whatever it was
        asked about before.
        """
