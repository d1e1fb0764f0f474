"""Tokens per second of the whole system over REST, with and without drafts.

    python -m bench.throughput PROMPTS.jsonl [--draft none ngram hybrid] [--concurrency 1 8]

One cluster a drafter, all up at once but only one asked at a time, runs interleaved: what else the
machine does falls on all of them alike. Greedy, the same prompts everywhere. Prints a line a
drafter and concurrency: median tokens/s with least and most, and what the target counted.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from bench.cluster import Cluster, first_turns, running_cluster


def tokens_per_second(
    cluster: Cluster, prompts: Sequence[str], concurrency: int, max_tokens: int
) -> float:
    """Output tokens per second over all prompts."""
    model = cluster.model

    def one(prompt: str) -> int:
        answer = cluster.complete(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            temperature=0,
            max_tokens=max_tokens,
            ignore_eos=True,
        )
        count: int = answer["usage"]["completion_tokens"]
        return count

    started = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        tokens = sum(pool.map(one, prompts))
    return tokens / (time.monotonic() - started)


def counted(cluster: Cluster) -> str:
    """What the target says of its drafts, steps and link since it started."""
    samples = cluster.metrics()
    drafts = samples.get("outrider_drafts_total", 0.0)
    accepted = samples.get("outrider_accepted_tokens_total", 0.0)
    words = [f"acceptance length {1 + accepted / drafts:.2f}" if drafts else "no drafts"]
    for mode in ("plain", "speculative"):
        count = samples.get(f'outrider_step_seconds_count{{mode="{mode}"}}', 0.0)
        total = samples.get(f'outrider_step_seconds_sum{{mode="{mode}"}}', 0.0)
        if count:
            words.append(f"{count:.0f} {mode} steps of {total / count * 1e3:.1f} ms")
    words += _split(samples, accepted)
    links = cluster.get("/status").json()["details"]["target"]["links"]
    for link in links:
        words.append(
            f"round trip p50 {link['round_trip_p50_seconds'] * 1e3:.2f} ms, "
            f"p95 {link['round_trip_p95_seconds'] * 1e3:.2f} ms"
        )
    for name, what in (
        ("outrider_draft_rows_dropped_total", "draft rows not used"),
        ("outrider_bypass_steps_total", "steps that asked for none"),
    ):
        reasons = {
            sample.removeprefix(f'{name}{{reason="').removesuffix('"}'): count
            for sample, count in samples.items()
            if sample.startswith(f"{name}{{") and count
        }
        if reasons:
            words.append(f"{what}: " + ", ".join(f"{why} {n:.0f}" for why, n in reasons.items()))
    return "; ".join(words)


def _split(samples: dict[str, float], accepted: float) -> list[str]:
    """Where the time of a speculative step went, and what an accepted token cost on the link."""
    steps = samples.get('outrider_steps_total{mode="speculative"}', 0.0)
    if not steps:
        return []

    def part(name: str) -> float:
        seconds = samples.get(f'outrider_speculative_seconds_total{{part="{name}"}}', 0.0)
        return seconds / steps * 1e3

    whole = samples['outrider_step_seconds_sum{mode="speculative"}'] / steps * 1e3
    rest = whole - part("forward") - part("draft_wait")
    words = [
        f"a speculative step: forward {part('forward'):.1f} ms, waiting for the draft "
        f"{part('draft_wait'):.1f} ms (drafting {part('draft_build'):.1f} ms), rest {rest:.1f} ms"
    ]
    feature_bytes = {
        transport: samples.get(f'outrider_link_feature_bytes_total{{transport="{transport}"}}', 0.0)
        for transport in ("inline", "shared_memory")
    }
    if accepted and any(feature_bytes.values()):
        step_bytes = samples.get("outrider_link_step_bytes_total", 0.0)
        words.append(
            f"bytes for an accepted token: Step messages {step_bytes / accepted:.0f}, features "
            + ", ".join(f"{name} {size / accepted:.0f}" for name, size in feature_bytes.items())
        )
    return words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--draft", nargs="+", default=["none", "ngram", "hybrid"])
    parser.add_argument(
        "--draft-model", help="for drafters with a model; a head that ships needs none"
    )
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--count", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--up", nargs="*", default=[], metavar="FLAG=VALUE", help="for outrider up")
    arguments = parser.parse_args()
    prompts = first_turns(arguments.prompts, arguments.count)
    results: dict[tuple[str, int], list[float]] = {}
    with ExitStack() as stack:
        clusters = {}
        for draft in arguments.draft:
            flags = ["--draft", draft, *(f"--{flag}" for flag in arguments.up)]
            if arguments.draft_model and draft in ("standalone", "eagle3", "hybrid"):
                flags += ["--draft-model", arguments.draft_model]
            clusters[draft] = stack.enter_context(running_cluster(*flags))
        for _ in range(arguments.repeat):
            for concurrency in arguments.concurrency:
                for draft, cluster in clusters.items():
                    results.setdefault((draft, concurrency), []).append(
                        tokens_per_second(cluster, prompts, concurrency, arguments.max_tokens)
                    )
        for (draft, concurrency), rates in results.items():
            print(
                f"{draft} concurrency {concurrency}: {statistics.median(rates):.1f} tokens/s "
                f"({min(rates):.1f} to {max(rates):.1f})"
            )
        for draft, cluster in clusters.items():
            print(f"{draft}: {counted(cluster)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
