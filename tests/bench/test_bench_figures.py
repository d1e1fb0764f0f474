"""From answers to figures, and from figures to comparisons."""

import math

import pytest

from outrider.bench.answer import Answer
from outrider.bench.counters import Counters
from outrider.bench.envelope import compare
from outrider.bench.figures import Figures, Percentiles, figures_of
from outrider.bench.load import Load, Run
from outrider.bench.measure import Measured
from outrider.bench.report import table_of, warnings_of


def answer(first: float, gaps: list[float], tokens: int, error: str = "") -> Answer:
    pieces = [first]
    for gap in gaps:
        pieces.append(pieces[-1] + gap)
    return Answer(
        asked=0.0, ended=pieces[-1] + 0.5, pieces=pieces, output_tokens=tokens, error=error
    )


def figures(rate: float, **changes: object) -> Figures:
    run = Run(answers=[answer(0.1, [0.1], 2)], seconds=2 / rate, client_share=0.1)
    values = {name: getattr(figures_of(run, None), name) for name in Figures.__slots__}
    return Figures(**{**values, **changes})  # type: ignore[arg-type]


def measured(name: str, rate: float, repetition: int = 0, concurrency: int = 4) -> Measured:
    return Measured(
        name=name,
        load=Load(concurrency=concurrency),
        repetition=repetition,
        figures=figures(rate),
    )


def test_percentiles_are_interpolated() -> None:
    found = Percentiles.of([4.0, 1.0, 2.0, 3.0])
    assert found is not None
    assert (found.p50, found.p90, found.p99) == pytest.approx((2.5, 3.7, 3.97))
    assert Percentiles.of([]) is None


def test_a_run_counts_good_answers_only_and_the_errors_beside_them() -> None:
    run = Run(
        answers=[
            answer(0.2, [0.1, 0.3], 9),
            answer(0.4, [0.2], 3),
            answer(9.0, [9.0], 50, error="broke"),
        ],
        seconds=4.0,
        client_share=0.25,
    )
    counters = Counters(drafts=4, accepted_tokens=6, speculative_steps=3, plain_steps=1)
    found = figures_of(run, counters)
    assert (found.requests, found.errors, found.first_error) == (3, 1, "broke")
    assert found.output_tokens_per_second == pytest.approx(12 / 4)
    assert found.requests_per_second == pytest.approx(2 / 4)
    assert found.first_token_seconds is not None and found.inter_token_seconds is not None
    assert found.first_token_seconds.p50 == pytest.approx(0.3)
    # 0.4 s for eight tokens behind the first, 0.2 s for two.
    assert found.inter_token_seconds.p50 == pytest.approx((0.05 + 0.1) / 2)
    assert found.piece_gap_seconds is not None
    assert found.piece_gap_seconds.p50 == pytest.approx(0.2)
    assert found.acceptance_length == pytest.approx(2.5)
    assert found.bypass_share == pytest.approx(0.25)


def test_counters_of_a_run_are_a_difference_and_say_nothing_of_nothing() -> None:
    before = Counters(drafts=10, accepted_tokens=20, speculative_steps=7, plain_steps=5)
    after = Counters(drafts=12, accepted_tokens=23, speculative_steps=9, plain_steps=13)
    run = after.since(before)
    assert (run.acceptance_length, run.bypass_share) == (2.5, 0.8)
    assert before.since(before).acceptance_length is None
    assert before.since(before).bypass_share is None


def test_auto_is_compared_with_the_mode_that_was_best_in_the_other_repetitions() -> None:
    """Of two modes that are alike, the luckier one of each repetition would be 5 % better."""
    rates = {"off": [100, 110, 100], "3 drafts": [108, 98, 108], "auto": [104, 105, 103]}
    runs = [
        measured(name, rate, repetition)
        for name, by_repetition in rates.items()
        for repetition, rate in enumerate(by_repetition)
    ]
    (found,) = compare(runs)
    # Without the first: medians 105 and 103; without the second: 100 and 108; the third: 105, 103.
    ratios = [104 / 100, 105 / 98, 103 / 100]
    assert found.ratio == pytest.approx(sum(ratios) / 3)
    mean = sum(ratios) / 3
    spread = math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / 2)
    assert found.half_width == pytest.approx(4.303 * spread / math.sqrt(3))
    assert found.best == "3 drafts"
    assert found.words().startswith("4 at once: auto is 1.047 +- ")


def test_one_repetition_is_compared_with_its_own_best_and_without_an_interval() -> None:
    runs = [measured("off", 100), measured("5 drafts", 80), measured("auto", 99)]
    runs += [measured(one.name, 50, concurrency=1) for one in runs if one.name != "auto"]
    (found,) = compare(runs)
    assert (found.best, found.ratio, found.half_width) == ("off", pytest.approx(0.99), None)


def test_failures_and_a_busy_client_are_warned_of() -> None:
    good = measured("off", 10)
    bad = Measured(
        name="auto",
        load=Load(rate=2.0),
        repetition=0,
        figures=figures(10, errors=2, first_error="status 503", client_share=0.97),
    )
    assert warnings_of([good]) == []
    assert warnings_of([good, bad]) == [
        "auto, 2/s: 2 requests failed, the first: status 503",
        "auto, 2/s: this client computed 97% of the time and may be what limits the rate",
    ]
    assert table_of([good, bad, measured("off", 12, 1)]).row_count == 2
