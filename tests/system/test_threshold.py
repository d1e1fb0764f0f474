"""The batch threshold means exactly what it says, seen from outside."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from bench.cluster import Cluster, running_cluster

PROMPT = "one two three four one two three four one two three four one two"
THRESHOLD = 2


@contextmanager
def decoding(cluster: Cluster, sequences: int, max_tokens: int) -> Iterator[None]:
    """So many sequences, running together when the block is entered and finished behind it."""
    with ThreadPoolExecutor(sequences) as pool:
        running = [
            pool.submit(
                cluster.complete,
                prompt=PROMPT,
                max_tokens=max_tokens,
                temperature=0,
                ignore_eos=True,
            )
            for _ in range(sequences)
        ]
        deadline = time.monotonic() + 20
        while cluster.metrics()["outrider_running_sequences"] < sequences:
            assert time.monotonic() < deadline, "the sequences never ran together"
            time.sleep(0.01)
        yield
        for completion in running:
            assert completion.result()["usage"]["completion_tokens"] == max_tokens


def moved(before: dict[str, float], after: dict[str, float]) -> set[str]:
    """Kinds of link messages whose counters moved."""
    return {
        name.split('kind="')[1].split('"')[0]
        for name in after
        if name.startswith("outrider_link_messages_total") and after[name] != before.get(name, 0)
    }


@pytest.fixture(scope="module")
def bounded_cluster() -> Iterator[Cluster]:
    with running_cluster(
        "--draft", "ngram", "--speculation", "fixed",
        "--speculative-disable-batch-threshold", str(THRESHOLD),
    ) as cluster:  # fmt: skip
        yield cluster


def assert_drafts_are_asked_for(cluster: Cluster, sequences: int) -> None:
    before = cluster.metrics()
    with decoding(cluster, sequences, 40):
        pass
    after = cluster.metrics()
    assert {"open", "step"} <= moved(before, after)
    assert after["outrider_drafts_total"] > before["outrider_drafts_total"]
    threshold_steps = 'outrider_bypass_steps_total{reason="threshold"}'
    assert after.get(threshold_steps, 0) == before.get(threshold_steps, 0)


def test_threshold_0_never_bypasses(ngram_cluster: Cluster) -> None:
    assert_drafts_are_asked_for(ngram_cluster, THRESHOLD + 1)


def test_as_many_sequences_as_the_threshold_are_drafted_for(bounded_cluster: Cluster) -> None:
    assert_drafts_are_asked_for(bounded_cluster, THRESHOLD)


def test_one_sequence_above_the_threshold_nothing_but_pings_crosses_the_link(
    bounded_cluster: Cluster,
) -> None:
    bypassed = 'outrider_bypass_steps_total{reason="threshold"}'
    earlier = bounded_cluster.metrics()[bypassed]
    with decoding(bounded_cluster, THRESHOLD + 1, 150):
        # The step in which the last one joined may still have been below the threshold.
        deadline = time.monotonic() + 20
        while (before := bounded_cluster.metrics())[bypassed] < earlier + 2:
            assert time.monotonic() < deadline, "no step was above the threshold"
            time.sleep(0.01)
        time.sleep(0.5)
        after = bounded_cluster.metrics()
        assert after["outrider_running_sequences"] == THRESHOLD + 1, "some ended too early"
    assert moved(before, after) <= {"ping"}
    assert after["outrider_drafts_total"] == before["outrider_drafts_total"]
    assert after[bypassed] > before[bypassed]
