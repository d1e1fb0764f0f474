"""The learning rate as a function of how much of the run is over (0 to 1)."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up, then cosine decay, or a plateau with a linear decay at its end (`wsd`)."""

    peak: float
    warmup: float  # share of the run
    final_ratio: float  # of the peak, at the end
    kind: Literal["cosine", "wsd"]
    decay: float = 0.3  # share of the run that `wsd` decays over

    def rate(self, fraction: float) -> float:
        """The rate once `fraction` of the run is over; the first updates have a little already."""
        fraction = min(max(fraction, 0.0), 1.0)
        if fraction < self.warmup:
            return self.peak * max(0.02, fraction / self.warmup)
        if self.kind == "cosine":
            progress = (fraction - self.warmup) / max(1e-9, 1.0 - self.warmup)
            share = 0.5 * (1.0 + math.cos(math.pi * progress))
        else:
            share = min(1.0, (1.0 - fraction) / self.decay)
        return self.peak * (self.final_ratio + (1.0 - self.final_ratio) * share)
