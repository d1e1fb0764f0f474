"""Every service stopped by SIGTERM in turn, as in an upgrade, while clients go on asking."""

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from bench.cluster import Cluster, running_cluster

NUM_CLIENTS = 6
MAX_TOKENS = 120


def body(cluster: Cluster, index: int) -> dict[str, object]:
    return {
        "model": cluster.model, "prompt": f"{index} a b c a b c a b", "max_tokens": MAX_TOKENS,
        "temperature": 0.8 * (index % 2), "seed": index, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


def ask_on(
    cluster: Cluster, index: int, wanted: list[int], is_over: threading.Event
) -> Counter[str]:
    """Asks again and again. A refusal, with 503 or no connection, is asked again; whatever was
    accepted must be answered, and right.
    """
    seen: Counter[str] = Counter()
    request = body(cluster, index)
    while not is_over.is_set():
        try:
            response = httpx.post(
                f"{cluster.url}/v1/completions", json=request, timeout=120, trust_env=False
            )
        except httpx.ConnectError:
            seen["no connection"] += 1
            time.sleep(0.1)
            continue
        if response.status_code == 503:
            assert response.headers["retry-after"]
            seen["refused"] += 1
            time.sleep(0.1)
            continue
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["token_ids"] == wanted
        seen["answered"] += 1
    return seen


def restart(cluster: Cluster, service: str) -> None:
    """SIGTERM, and ready again with another process."""
    before = cluster.process_id(service)
    os.kill(before, signal.SIGTERM)
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline, (cluster.errors[-30:], service)
        time.sleep(0.2)
        try:
            ready = cluster.get("/readyz")
            is_back = ready.status_code == 200 and not ready.json()["degraded"]
            if is_back and cluster.process_id(service) != before:
                return
        except httpx.TransportError:
            continue


@pytest.mark.full
def test_no_request_is_lost_and_none_is_answered_wrongly(tiny_model: Path) -> None:
    with running_cluster(
        "--model", str(tiny_model), "--draft", "ngram", "--speculation", "fixed"
    ) as cluster:
        wanted = [
            cluster.complete(**body(cluster, index))["choices"][0]["token_ids"]
            for index in range(NUM_CLIENTS)
        ]
        is_over = threading.Event()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [
                pool.submit(ask_on, cluster, index, wanted[index], is_over)
                for index in range(NUM_CLIENTS)
            ]
            try:
                for service in ("draft", "target", "gateway"):
                    time.sleep(1)
                    restart(cluster, service)
            finally:
                is_over.set()
            seen = sum((client.result(150) for client in clients), Counter())
        assert seen["answered"] > 2 * NUM_CLIENTS
        assert seen["refused"] > 0
        died = [line for line in [*cluster.output, *cluster.errors] if " died (" in line]
        # Each drained and left with 0.
        assert len(died) == 3 and all("exit code 0" in line for line in died), died
        assert cluster.stop() == 0
