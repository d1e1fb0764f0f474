"""The target's own model as its drafter: every draft token is right, at any temperature."""

from pathlib import Path

import pytest
from prompts import PROMPTS

from bench.cluster import running_cluster
from outrider.serving.model_source import DEFAULT_MODEL, resolve_model
from tests.processor import ENGINE_DTYPES

DRAFT_LENGTH = 5
MAX_TOKENS = 60


def check(model: Path, *flags: str, full_share: float = 0.0, **environment: str) -> None:
    """Every draft is accepted whole. So much of what could be drafted is: a busy machine's drafts
    are late, or end where their time does.
    """
    with running_cluster(
        "--model", str(model), "--draft", "standalone", "--draft-model", str(model),
        "--speculation", "fixed", "--max-draft-length", str(DRAFT_LENGTH), *flags, **environment,
    ) as cluster:  # fmt: skip
        for temperature in (0.0, 0.8):
            before = cluster.metrics()
            for index, prompt in enumerate(PROMPTS):
                cluster.complete(
                    prompt=prompt,
                    temperature=temperature,
                    seed=index,
                    max_tokens=MAX_TOKENS,
                    ignore_eos=True,
                )
            after = cluster.metrics()
            drafts, drafted, accepted = (
                after[f"outrider_{name}_total"] - before[f"outrider_{name}_total"]
                for name in ("drafts", "draft_tokens", "accepted_tokens")
            )
            assert accepted == drafted > 0, temperature
            assert drafted >= full_share * DRAFT_LENGTH * drafts
            # The first token of an answer is the prompt's, and each draft brings one beside it.
            emitted = len(PROMPTS) * (MAX_TOKENS - 1)
            assert drafted + drafts >= full_share * emitted


def test_one_layer_drafts_perfectly_for_itself(tiny_model: Path) -> None:
    check(tiny_model)


@pytest.mark.full
def test_drafts_that_have_their_time_are_of_full_length(tiny_model: Path) -> None:
    check(tiny_model, full_share=0.5, OUTRIDER_INJECT_FAULT="target:step:delay=0.05")


@pytest.mark.full
@pytest.mark.parametrize("dtype", ENGINE_DTYPES)
def test_the_default_model_drafts_perfectly_for_itself(dtype: str) -> None:
    check(Path(resolve_model(DEFAULT_MODEL).path), "--dtype", dtype)
