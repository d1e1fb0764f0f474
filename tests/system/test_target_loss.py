"""The target killed under running streams: each goes on, with the tokens that it would have had."""

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from prompts import PROMPTS

from bench.cluster import Cluster, running_cluster

NUM_STREAMS = 8


def start(
    pool: ThreadPoolExecutor, cluster: Cluster, max_tokens: int
) -> list["Future[tuple[list[int], str, int]]"]:
    """Half of them greedy, half at temperature 0.8 and with a penalty on what was said."""

    def one(index: int) -> tuple[list[int], str, int]:
        answer = cluster.complete(
            messages=[{"role": "user", "content": PROMPTS[index % len(PROMPTS)]}],
            temperature=0.8 * (index % 2),
            frequency_penalty=0.3 * (index % 2),
            seed=index,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        choice = answer["choices"][0]
        return choice["token_ids"], choice["message"]["content"], answer["usage"]["prompt_tokens"]

    return [pool.submit(one, index) for index in range(NUM_STREAMS)]


def wait_until(cluster: Cluster, metric: str, value: float) -> None:
    deadline = time.monotonic() + 60
    while cluster.metrics()[metric] < value:
        assert time.monotonic() < deadline, (metric, cluster.metrics()[metric])
        time.sleep(0.02)


def kill_under_streams(cluster: Cluster, max_tokens: int) -> None:
    with ThreadPoolExecutor(NUM_STREAMS) as pool:
        undisturbed = [future.result() for future in start(pool, cluster, max_tokens)]
        running = start(pool, cluster, max_tokens)
        wait_until(cluster, "outrider_gateway_running_requests", NUM_STREAMS)
        before = cluster.metrics()["outrider_emitted_tokens_total"]
        # Into the middle of them.
        wait_until(cluster, "outrider_emitted_tokens_total", before + 2 * max_tokens)
        target = cluster.process_id("target")
        os.kill(target, signal.SIGKILL)
        assert [future.result() for future in running] == undisturbed
    assert all(len(token_ids) == max_tokens for token_ids, _, _ in undisturbed)
    assert cluster.process_id("target") != target
    assert cluster.metrics()["outrider_replayed_sequences_total"] == NUM_STREAMS
    page = cluster.get("/status").json()["replay"]
    assert (page["replayed"], page["waiting_requests"]) == (NUM_STREAMS, 0)
    assert any("target died (signal 9" in line for line in cluster.errors + cluster.output)


def test_all_streams_complete_with_the_same_text(tiny_model: Path) -> None:
    with running_cluster(
        "--model", str(tiny_model), "--draft", "ngram", "--speculation", "fixed"
    ) as cluster:
        kill_under_streams(cluster, max_tokens=200)


@pytest.mark.full
def test_all_streams_of_the_default_model_complete_with_the_same_text() -> None:
    with running_cluster() as cluster:
        kill_under_streams(cluster, max_tokens=100)
