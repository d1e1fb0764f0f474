"""From the answers of a run to its figures."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from outrider.bench.counters import Counters
from outrider.bench.load import Run

PERCENTS = (50, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Percentiles:
    """Seconds; linearly interpolated between the two nearest."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Percentiles | None":
        """None without a value."""
        numbers = np.fromiter(values, dtype=np.float64)
        if not len(numbers):
            return None
        p50, p90, p99 = np.percentile(numbers, PERCENTS).tolist()
        return cls(p50=p50, p90=p90, p99=p99)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Of one run. Rates are over the whole of it, the last answers' tail included."""

    requests: int
    errors: int
    first_error: str
    seconds: float
    output_tokens: int
    cached_prompt_tokens: int
    prompt_tokens: int
    output_tokens_per_second: float
    requests_per_second: float
    first_token_seconds: Percentiles | None
    # Each answer's mean; then the pauses between pieces of text, of all answers.
    inter_token_seconds: Percentiles | None
    piece_gap_seconds: Percentiles | None
    request_seconds: Percentiles | None
    acceptance_length: float | None
    bypass_share: float | None
    client_share: float


def figures_of(run: Run, counters: Counters | None) -> Figures:
    """`counters`: of this run; None for a server that has none."""
    good = [answer for answer in run.answers if not answer.error]
    errors = [answer.error for answer in run.answers if answer.error]
    means = (answer.inter_token_seconds for answer in good)
    tokens = sum(answer.output_tokens for answer in good)
    return Figures(
        requests=len(run.answers),
        errors=len(errors),
        first_error=errors[0] if errors else "",
        seconds=run.seconds,
        output_tokens=tokens,
        cached_prompt_tokens=sum(answer.cached_tokens for answer in good),
        prompt_tokens=sum(answer.prompt_tokens for answer in good),
        output_tokens_per_second=tokens / run.seconds,
        requests_per_second=len(good) / run.seconds,
        first_token_seconds=Percentiles.of(answer.first_token_seconds for answer in good),
        inter_token_seconds=Percentiles.of(mean for mean in means if mean is not None),
        piece_gap_seconds=Percentiles.of(
            gap for answer in good for gap in np.diff(answer.pieces).tolist()
        ),
        request_seconds=Percentiles.of(answer.seconds for answer in good),
        acceptance_length=None if counters is None else counters.acceptance_length,
        bypass_share=None if counters is None else counters.bypass_share,
        client_share=run.client_share,
    )
