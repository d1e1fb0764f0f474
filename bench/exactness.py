"""Compares token ids with every drafter against plain decoding: the first promise, measured.

    python -m bench.exactness PROMPTS.jsonl [--drafts none ngram eagle3 hybrid]
        [--draft-model DRAFT.gguf] [--transports shared_memory inline] [--restart SECONDS]
        [--count 100] [--max-tokens 64]

For each dtype and temperature, the prompts run plainly, and with each drafter alone and at
concurrency 8, the bypass threshold being crossed back and forth as sequences come and go. Drafters
that read features run once for each transport. With --restart the draft process is killed every
so many seconds (below 30, `outrider up` waits longer each time before it starts it again). Prints
one line a run; exits with 1 on any difference.
"""

import argparse
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from bench.cluster import Cluster, first_turns, running_cluster

TEMPERATURES = (0.0, 0.8)
# What needs no --draft-model.
DRAFTS = ("none", "ngram", "eagle3", "hybrid")
DRAFTS_WITH_FEATURES = ("eagle3", "hybrid")
TRANSPORTS = ("shared_memory", "inline")
# Sequences decoding at once above which nothing is drafted.
THRESHOLDS = ("0", "4")
LOOK_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What one cluster runs with. No transport: the drafter reads no features."""

    dtype: str
    draft: str
    draft_model: str
    transport: str
    threshold: str

    @property
    def flags(self) -> list[str]:
        """Of `outrider up`."""
        flags = ["--draft", self.draft, "--dtype", self.dtype, "--speculation", "fixed",
                 "--speculative-disable-batch-threshold", self.threshold]  # fmt: skip
        return [*flags, "--draft-model", self.draft_model] if self.draft_model else flags

    @property
    def environment(self) -> dict[str, str]:
        """Of `outrider up`."""
        return {"OUTRIDER_FEATURE_TRANSPORT": self.transport} if self.transport else {}

    def words(self) -> str:
        """The beginning of its lines."""
        transport = f" {self.transport}" if self.transport else ""
        return f"{self.dtype} {self.draft}{transport} threshold {self.threshold}"


def settings(
    dtype: str, drafts: Sequence[str], transports: Sequence[str], draft_model: str
) -> Iterator[Setting]:
    """All clusters of a dtype, the plain one first: the others are compared with it."""
    for draft in ("none", *(draft for draft in drafts if draft != "none")):
        for transport in transports if draft in DRAFTS_WITH_FEATURES else ("",):
            for threshold in THRESHOLDS[:1] if draft == "none" else THRESHOLDS:
                yield Setting(
                    dtype=dtype,
                    draft=draft,
                    draft_model=draft_model if draft == "standalone" else "",
                    transport=transport,
                    threshold=threshold,
                )


def run(
    cluster: Cluster, prompts: Sequence[str], temperature: float, concurrency: int, max_tokens: int
) -> list[list[int]]:
    """Token ids of each prompt's answer, seeded by its index."""
    model = cluster.model

    def one(index: int) -> list[int]:
        answer = cluster.complete(
            model=model,
            messages=[{"role": "user", "content": prompts[index]}],
            temperature=temperature,
            seed=index,
            max_tokens=max_tokens,
        )
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, range(len(prompts))))


class Killer:
    """Kills the draft process of a cluster again and again; `outrider up` starts it anew."""

    def __init__(self, cluster: Cluster, period_seconds: float) -> None:
        self._cluster = cluster
        self._period_seconds = period_seconds
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.kills = 0

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        last = 0
        while not self._is_over.wait(self._period_seconds):
            # Only one that serves: killed before, it would be a start that failed.
            while (process_id := self._serving()) in (0, last):
                if self._is_over.wait(LOOK_SECONDS):
                    return
            os.kill(process_id, signal.SIGKILL)
            last = process_id
            self.kills += 1

    def _serving(self) -> int:
        """The process id of a draft service that serves, else 0."""
        try:
            draft = self._cluster.get("/status").json()["details"].get("draft")
        except httpx.TransportError:
            return 0
        serves = draft is not None and draft["is_answering"] and draft["state"] == "SERVING"
        return int(draft["process_id"]) if serves else 0


@contextmanager
def killing(cluster: Cluster, period_seconds: float) -> Iterator[Killer]:
    """The draft process is killed so often inside; 0 = never."""
    killer = Killer(cluster, period_seconds)
    if period_seconds:
        killer.start()
    try:
        yield killer
    finally:
        if period_seconds:
            killer.stop()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument(
        "--drafts",
        nargs="+",
        choices=(*DRAFTS, "standalone"),
        help=f"default: {' '.join(DRAFTS)}, and standalone with --draft-model",
    )
    parser.add_argument("--draft-model", default="", help="for the standalone drafter")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument(
        "--restart", type=float, default=0.0, help="seconds between two kills of the draft process"
    )
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--alone", type=int, default=100, help="prompts of the runs at concurrency 1"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    drafts = arguments.drafts or [*DRAFTS, *(["standalone"] if arguments.draft_model else [])]
    if "standalone" in drafts and not arguments.draft_model:
        parser.error("--drafts standalone needs --draft-model")
    prompts = first_turns(arguments.prompts, arguments.count)
    num_different = 0
    for dtype in arguments.dtypes:
        expected: dict[float, list[list[int]]] = {}
        for setting in settings(dtype, drafts, arguments.transports, arguments.draft_model):
            with running_cluster(*setting.flags, **setting.environment) as cluster:
                period = 0.0 if setting.draft == "none" else arguments.restart
                with killing(cluster, period) as killer:
                    for temperature in TEMPERATURES:
                        for concurrency in (8, 1) if setting.threshold == "0" else (8,):
                            some = prompts if concurrency == 8 else prompts[: arguments.alone]
                            started = time.monotonic()
                            answers = run(
                                cluster, some, temperature, concurrency, arguments.max_tokens
                            )
                            seconds = time.monotonic() - started
                            reference = expected.setdefault(temperature, answers)
                            different = sum(
                                answer != right
                                for answer, right in zip(answers, reference, strict=False)
                            )
                            num_different += different
                            tokens = sum(map(len, answers))
                            print(
                                f"{setting.words()} temperature {temperature} "
                                f"concurrency {concurrency}: {len(some)} prompts, {tokens} tokens, "
                                f"{tokens / seconds:.1f} tokens/s, {different} differ",
                                flush=True,
                            )
                _print_counters(cluster, killer.kills)
    return 1 if num_different else 0


def _print_counters(cluster: Cluster, kills: int) -> None:
    samples = cluster.metrics()
    accepted = samples.get("outrider_accepted_tokens_total", 0.0)
    drafted = samples.get("outrider_draft_tokens_total", 0.0)
    speculative = samples.get('outrider_steps_total{mode="speculative"}', 0.0)
    plain = samples.get('outrider_steps_total{mode="plain"}', 0.0)
    features = ", ".join(
        f"{samples[name] / 2**20:.1f} MiB {transport}"
        for transport in TRANSPORTS
        if samples.get(name := f'outrider_link_feature_bytes_total{{transport="{transport}"}}')
    )
    print(
        f"    accepted {accepted:.0f} of {drafted:.0f} draft tokens; "
        f"steps: {speculative:.0f} speculative, {plain:.0f} plain"
        + (f"; features: {features}" if features else "")
        + (f"; draft process killed {kills} times" if kills else ""),
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
