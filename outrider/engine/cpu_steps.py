"""Steps on the CPU: one forward, then tokens drawn from its logits as far as drafts are right."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.acceptance import Verdict
from outrider.engine.feature_projection import load_projection
from outrider.engine.feature_tap import FeatureTap, Tap
from outrider.engine.host_verdict import verdict_of
from outrider.engine.runner import Runner
from outrider.engine.verify_step import SequenceStep


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSteps:
    """A StepEngine over a runner; `launch` returns when the forward is done."""

    runner: Runner
    runs_beside_host: bool = False

    def launch(self, sequences: Sequence[SequenceStep], tap: Tap | None) -> "CpuStep":
        assert tap is None or isinstance(tap, FeatureTap)
        logits = self.runner.forward([sequence.rows for sequence in sequences], tap)
        return CpuStep(sequences=sequences, logits=logits)

    def make_tap(self, data: bytes) -> FeatureTap:
        decoder = self.runner.decoder
        projection = load_projection(
            data,
            hidden_size=decoder.config.hidden_size,
            dtype=decoder.weights.embedding.weight.dtype,
        )
        return self.runner.make_tap(projection)


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuStep:
    """A step whose logits are there."""

    sequences: Sequence[SequenceStep]
    logits: npt.NDArray[np.float32]  # [sum of num_logits, vocab_size]

    def verdicts(self) -> list[Verdict]:
        """Draws no further than each draft is right."""
        verdicts = []
        first = 0
        for sequence in self.sequences:
            end = first + sequence.rows.num_logits
            if sequence.sampling is not None:
                verdicts.append(verdict_of(sequence, self.logits[first:end]))
            first = end
        return verdicts
