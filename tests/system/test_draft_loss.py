"""The draft service killed, stopped and restarted under running streams."""

import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from prompts import PROMPTS

from bench.cluster import Cluster, running_cluster

MAX_TOKENS = 100


def start(pool: ThreadPoolExecutor, cluster: Cluster) -> list["Future[list[int]]"]:
    def one(index: int) -> list[int]:
        answer = cluster.complete(
            messages=[{"role": "user", "content": PROMPTS[index]}],
            temperature=0.8,
            seed=index,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        )
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    return [pool.submit(one, index) for index in range(len(PROMPTS))]


def accepted(cluster: Cluster) -> float:
    return cluster.metrics()["outrider_accepted_tokens_total"]


def wait_for_acceptance(cluster: Cluster, seconds: float) -> None:
    """Drafts are accepted again within the time, with a request that n-grams match."""
    before = accepted(cluster)
    deadline = time.monotonic() + seconds
    while accepted(cluster) == before:
        assert time.monotonic() < deadline, cluster.get("/status").text
        cluster.complete(prompt="a b c d a b c d a b c d a b", max_tokens=8, temperature=0)


@pytest.mark.parametrize("way", ["kill", pytest.param("stop", marks=pytest.mark.full)])
def test_streams_finish_with_the_same_tokens_and_drafts_come_back(way: str) -> None:
    with running_cluster("--draft", "ngram", "--speculation", "fixed") as cluster:
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            undisturbed = [future.result() for future in start(pool, cluster)]
            running = start(pool, cluster)
            time.sleep(0.8)
            draft = cluster.process_id("draft")
            os.kill(draft, signal.SIGKILL if way == "kill" else signal.SIGSTOP)
            assert [future.result() for future in running] == undisturbed
        if way == "stop":
            readiness = cluster.get("/readyz")
            assert readiness.status_code == 200
            os.kill(draft, signal.SIGCONT)
        wait_for_acceptance(cluster, 10)
        if way == "kill":
            assert cluster.process_id("draft") != draft
            assert any("draft died (signal 9" in line for line in cluster.errors + cluster.output)
        assert cluster.stop() == 0


@pytest.mark.full
def test_a_slow_draft_service_changes_neither_readiness_nor_tokens_and_is_left_alone(
    tiny_model: Path,
) -> None:
    with running_cluster(
        "--model", str(tiny_model), "--draft", "ngram", "--speculation", "fixed",
        OUTRIDER_INJECT_FAULT="draft:propose:delay=0.4",
    ) as cluster:  # fmt: skip
        prompt = "a b c d a b c d a b c d a b"
        started = time.monotonic()
        slow = cluster.complete(prompt=prompt, max_tokens=60, temperature=0)
        seconds = time.monotonic() - started
        plain = cluster.complete(
            prompt=prompt, max_tokens=60, temperature=0, speculation={"draft_length": 0}
        )
        assert slow["choices"][0]["token_ids"] == plain["choices"][0]["token_ids"]
        # Waiting for every draft would take 60 times 0.4 s.
        assert seconds < 8
        assert cluster.metrics()['outrider_bypass_steps_total{reason="circuit_open"}'] > 0
