"""How sure a drafter is of a token."""

import numpy as np
import numpy.typing as npt

from outrider.engine.sampling import Sampling


def probability_of(logits: npt.NDArray[np.float32], index: int, sampling: Sampling) -> float:
    """The softmax of one of these logits [n] at the temperature, without truncations; greedy: at
    temperature 1.
    """
    temperature = 1.0 if sampling.is_greedy else sampling.temperature
    with np.errstate(over="ignore", under="ignore"):
        relative = logits - logits[index]
        relative /= np.float32(temperature)
        np.exp(relative, out=relative)
        return float(1.0 / relative.sum())
