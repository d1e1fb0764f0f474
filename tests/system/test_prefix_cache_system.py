"""Chats on real processes: what was computed in an earlier turn is not computed again, and nothing
else changes.
"""

from typing import Any

import pytest

from bench.cluster import Cluster

BLOCK_SIZE = 32
TURNS = (
    "Here is a list: apples, pears, plums, cherries, grapes, figs. Repeat it in the same order, "
    "and then in the opposite order, one fruit a line, without any other words before or behind.",
    "Now only those that begin with a p, in the same order, and how many there are of them.",
    "And the first of the list again, then the last, then the first again.",
)


def chat(cluster: Cluster, **changes: Any) -> tuple[list[str], list[int], list[int]]:
    """The answers of a chat, prompt tokens of each turn, and cached ones."""
    messages: list[dict[str, str]] = []
    answers, lengths, cached = [], [], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        answer = cluster.complete(messages=messages, max_tokens=24, temperature=0, **changes)
        content = answer["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": content})
        usage = answer["usage"]
        answers.append(content)
        lengths.append(usage["prompt_tokens"])
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    return answers, lengths, cached


@pytest.mark.parametrize(
    "speculates",
    [pytest.param(False, marks=pytest.mark.full, id="plain"), pytest.param(True, id="with drafts")],
)
def test_each_turn_finds_the_turns_before_it(ngram_cluster: Cluster, speculates: bool) -> None:
    changes = {} if speculates else {"speculation": {"draft_length": 0}}
    answers, lengths, cached = chat(ngram_cluster, **changes)
    # A prompt of the earlier turns' tokens and its own: at least the turn before, in whole blocks.
    for before, found in zip(lengths, cached[1:], strict=False):
        assert found >= before // BLOCK_SIZE * BLOCK_SIZE
    # The same chat once more: all but the last tokens of every prompt, and the same answers.
    again, _, found_again = chat(ngram_cluster, **changes)
    assert again == answers
    assert found_again == [(length - 1) // BLOCK_SIZE * BLOCK_SIZE for length in lengths]
    metrics = ngram_cluster.metrics()
    assert metrics["outrider_cached_prompt_tokens_total"] >= sum(cached) + sum(found_again)
    assert metrics['outrider_kv_blocks{state="cached"}'] > 0
    assert metrics['outrider_kv_blocks{state="used"}'] == 0
