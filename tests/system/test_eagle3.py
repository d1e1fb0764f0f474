"""The head that ships for the default model, on real processes: the default drafter around it, its
features by either way, and what a restart or a bypass leaves of its acceptance.
"""

import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from prompt_answers import answers as prompt_answers

from bench.cluster import Cluster, running_cluster

MAX_TOKENS = 32
NO_DRAFTS = {"draft_length": 0}
SECONDS_TO_COME_BACK = 60.0
DROPPED = 'outrider_draft_rows_dropped_total{reason="%s"}'
FEATURE_BYTES = 'outrider_link_feature_bytes_total{transport="%s"}'
THRESHOLD = 3


@pytest.fixture(scope="module")
def default_cluster() -> Iterator[Cluster]:
    """What `outrider up` starts where nothing is said about the drafter."""
    with running_cluster("--speculation", "fixed") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def inline_cluster() -> Iterator[Cluster]:
    """The head alone, its features inline, nothing asked of it above the threshold."""
    with running_cluster(
        "--draft", "eagle3", "--speculation", "fixed",
        "--speculative-disable-batch-threshold", str(THRESHOLD),
        OUTRIDER_FEATURE_TRANSPORT="inline",
    ) as cluster:  # fmt: skip
        yield cluster


answers = partial(prompt_answers, max_tokens=MAX_TOKENS)


def link_of(cluster: Cluster) -> dict[str, Any]:
    (link,) = cluster.get("/status").json()["details"]["target"]["links"]
    found: dict[str, Any] = link
    return found


def accepted(cluster: Cluster) -> float:
    return cluster.metrics()["outrider_accepted_tokens_total"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """What drafts came to between two looks at the metrics."""

    emitted: float
    drafts: float
    draft_tokens: float
    accepted: float

    @classmethod
    def between(cls, before: dict[str, float], after: dict[str, float]) -> "Drafting":
        def moved(name: str) -> float:
            return after[f"outrider_{name}_total"] - before[f"outrider_{name}_total"]

        return cls(
            emitted=moved("emitted_tokens"),
            drafts=moved("drafts"),
            draft_tokens=moved("draft_tokens"),
            accepted=moved("accepted_tokens"),
        )

    @property
    def acceptance_length(self) -> float:
        return 1 + self.accepted / max(self.drafts, 1)


def assert_drafts_change_no_token(
    cluster: Cluster, plain: list[list[int]], temperature: float, *, transport: str
) -> None:
    """Alone and at concurrency 8, with features by this transport and by no other."""
    (other,) = {"inline", "shared_memory"} - {transport}
    before = cluster.metrics()
    assert answers(cluster, temperature, 8) == plain
    assert answers(cluster, temperature, 1) == plain
    after = cluster.metrics()
    assert Drafting.between(before, after).accepted > 0
    assert after[FEATURE_BYTES % transport] > before[FEATURE_BYTES % transport]
    assert after[FEATURE_BYTES % other] == 0


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.full), 0.8])
def test_the_default_is_the_hybrid_by_shared_memory_and_changes_no_token(
    default_cluster: Cluster, temperature: float
) -> None:
    link = link_of(default_cluster)
    assert (link["drafter"], link["feature_transport"]) == ("hybrid", "shared_memory")
    plain = answers(default_cluster, temperature, 8, speculation=NO_DRAFTS)
    assert_drafts_change_no_token(default_cluster, plain, temperature, transport="shared_memory")


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_inline_features_change_no_token_either_and_are_counted_as_such(
    default_cluster: Cluster, inline_cluster: Cluster, temperature: float
) -> None:
    link = link_of(inline_cluster)
    assert (link["drafter"], link["feature_transport"]) == ("eagle3", "inline")
    plain = answers(default_cluster, temperature, 8, speculation=NO_DRAFTS)
    assert_drafts_change_no_token(inline_cluster, plain, temperature, transport="inline")


def test_the_draft_service_dies_under_load_and_is_drafting_again(
    default_cluster: Cluster,
) -> None:
    draft = default_cluster.process_id("draft")
    undisturbed = answers(default_cluster, 0.8, 8)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(answers, default_cluster, 0.8, 8)
        time.sleep(0.5)
        os.kill(draft, signal.SIGKILL)
        assert running.result() == undisturbed
    before = accepted(default_cluster)
    deadline = time.monotonic() + SECONDS_TO_COME_BACK
    while accepted(default_cluster) == before:
        assert time.monotonic() < deadline, default_cluster.get("/status").text
        default_cluster.complete(prompt="a b c d a b c d a b c d a b", max_tokens=8, temperature=0)
    assert default_cluster.process_id("draft") != draft
    link = link_of(default_cluster)
    assert (link["drafter"], link["feature_transport"]) == ("hybrid", "shared_memory")


LONG_PROMPT = "Write a long story about a cat that wants to be a dog, day by day."
# Of 1 + accepted / drafts over some hundred tokens: where drafts start shifts with every one that
# is late, so two runs of one answer differ by a few per cent.
TOLERANCE = 0.1


class Watch:
    """The counters while an answer runs, at every so many of its tokens."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._is_over = threading.Event()
        self.samples: list[dict[str, float]] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Watch":
        self.samples.append(self._cluster.metrics())
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.samples.append(self._cluster.metrics())

    def _run(self) -> None:
        while not self._is_over.wait(0.1):
            self.samples.append(self._cluster.metrics())

    def behind(self, num_emitted: float) -> Drafting:
        """What there was from so many tokens on."""
        start = self.samples[0]["outrider_emitted_tokens_total"]
        first = next(
            sample
            for sample in self.samples
            if sample["outrider_emitted_tokens_total"] - start >= num_emitted
        )
        return Drafting.between(first, self.samples[-1])


def long_answer(cluster: Cluster, max_tokens: int) -> list[int]:
    answer = cluster.complete(
        messages=[{"role": "user", "content": LONG_PROMPT}],
        temperature=0,
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    token_ids: list[int] = answer["choices"][0]["token_ids"]
    return token_ids


@pytest.mark.full
def test_behind_a_bypass_acceptance_is_what_it_was(inline_cluster: Cluster) -> None:
    max_tokens = 300
    with Watch(inline_cluster) as watch:
        undisturbed = long_answer(inline_cluster, max_tokens)
    before = inline_cluster.metrics()
    with ThreadPoolExecutor(THRESHOLD + 1) as pool:
        running = pool.submit(long_answer, inline_cluster, max_tokens)
        time.sleep(0.3)
        others = [pool.submit(long_answer, inline_cluster, 20) for _ in range(THRESHOLD)]
        for other in others:
            assert other.result() == undisturbed[:20]
        back = inline_cluster.metrics()
        assert running.result() == undisturbed
    after = inline_cluster.metrics()
    bypassed = 'outrider_bypass_steps_total{reason="threshold"}'
    assert back[bypassed] > before[bypassed]
    assert after[DROPPED % "token_range"] == before[DROPPED % "token_range"]
    rest = Drafting.between(back, after)
    assert rest.emitted > max_tokens / 3
    expected = watch.behind(max_tokens - rest.emitted)
    assert rest.acceptance_length == pytest.approx(expected.acceptance_length, rel=TOLERANCE)


@pytest.mark.full
@pytest.mark.parametrize("draft", ["eagle3", "hybrid"])
def test_a_long_answer_is_drafted_for_as_well_behind_a_restart_as_without_one(draft: str) -> None:
    max_tokens = 900
    # Steps that take their time: the answer outlasts the restart, and no draft is late.
    with running_cluster(
        "--draft", draft, "--speculation", "fixed",
        OUTRIDER_INJECT_FAULT="target:step:delay=0.04",
    ) as cluster:  # fmt: skip
        with Watch(cluster) as watch:
            undisturbed = long_answer(cluster, max_tokens)
        draft_process = cluster.process_id("draft")
        with ThreadPoolExecutor(1) as pool, Watch(cluster) as disturbed:
            running = pool.submit(long_answer, cluster, max_tokens)
            time.sleep(1)
            os.kill(draft_process, signal.SIGKILL)
            time.sleep(1)
            before = accepted(cluster)
            # Until the gateway's own canary, whose drafts count as well, is through with it.
            while accepted(cluster) == before or cluster.get("/readyz").json()["degraded"]:
                assert not running.done(), "it came to its end before the draft service was back"
                time.sleep(0.1)
            back = cluster.metrics()
            assert running.result() == undisturbed
        after = disturbed.samples[-1]
        rest = Drafting.between(back, after)
        assert rest.emitted > 200
        expected = watch.behind(max_tokens - rest.emitted)
        assert rest.acceptance_length == pytest.approx(expected.acceptance_length, rel=TOLERANCE)
        resyncs = 'outrider_link_messages_total{direction="received",kind="resync"}'
        assert after[resyncs] - disturbed.samples[0][resyncs] <= 2
