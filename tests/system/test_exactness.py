"""The first promise, on real processes: drafts change the speed, never a token."""

from functools import partial
from pathlib import Path

import pytest
from prompt_answers import answers as prompt_answers

from bench.cluster import Cluster, running_cluster
from tests.processor import ENGINE_DTYPES

MAX_TOKENS = 40
NO_DRAFTS = {"draft_length": 0}
# Greedy answers see less of the sampling; they are for the long run.
GREEDY = pytest.param(0.0, marks=pytest.mark.full)


answers = partial(prompt_answers, max_tokens=MAX_TOKENS)


@pytest.mark.parametrize("temperature", [GREEDY, 0.8])
def test_ngram_drafts_change_no_token_alone_or_at_concurrency_8(
    ngram_cluster: Cluster, temperature: float
) -> None:
    plain = answers(ngram_cluster, temperature, 8, speculation=NO_DRAFTS)
    before = ngram_cluster.metrics()["outrider_accepted_tokens_total"]
    assert answers(ngram_cluster, temperature, 8) == plain
    assert answers(ngram_cluster, temperature, 1) == plain
    assert ngram_cluster.metrics()["outrider_accepted_tokens_total"] > before


@pytest.mark.parametrize("temperature", [GREEDY, 0.8])
def test_penalties_and_biases_see_the_accepted_tokens_of_a_draft_and_no_others(
    ngram_cluster: Cluster, temperature: float
) -> None:
    rules = {
        "presence_penalty": 0.1,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.05,
        "logit_bias": {"28": -2, "30": 1.5},
    }
    plain = answers(ngram_cluster, temperature, 8, speculation=NO_DRAFTS, **rules)
    before = ngram_cluster.metrics()["outrider_accepted_tokens_total"]
    assert answers(ngram_cluster, temperature, 8, **rules) == plain
    assert ngram_cluster.metrics()["outrider_accepted_tokens_total"] > before
    assert answers(ngram_cluster, temperature, 8, speculation=NO_DRAFTS) != plain


@pytest.mark.full
@pytest.mark.parametrize("dtype", ENGINE_DTYPES)
def test_standalone_drafts_and_a_crossed_threshold_change_no_token(
    short_model: Path, ngram_cluster: Cluster, dtype: str
) -> None:
    flags = ("--draft", "standalone", "--draft-model", str(short_model), "--dtype", dtype)
    with running_cluster(
        *flags, "--speculation", "fixed", "--max-draft-length", "3",
        "--speculative-disable-batch-threshold", "4",
    ) as cluster:  # fmt: skip
        for temperature in (0.0, 0.8):
            plain = answers(cluster, temperature, 8, speculation=NO_DRAFTS)
            assert answers(cluster, temperature, 8) == plain
            if dtype == "bfloat16":
                assert answers(ngram_cluster, temperature, 8) == plain
        samples = cluster.metrics()
        assert samples['outrider_bypass_steps_total{reason="threshold"}'] > 0
        assert samples["outrider_accepted_tokens_total"] > 0
