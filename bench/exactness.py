"""Compares token ids with every drafter against plain decoding: the first promise, measured.

    python -m bench.exactness PROMPTS.jsonl --draft-model DRAFT.gguf [--count 100] [--max-tokens 64]

For each dtype and temperature, the prompts run plainly, and with each drafter alone and at
concurrency 8, the bypass threshold being crossed back and forth as sequences come and go. Prints
one line a run; exits with 1 on any difference.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.cluster import Cluster, first_turns, running_cluster

TEMPERATURES = (0.0, 0.8)


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--draft-model", required=True, help="for the standalone drafter")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument(
        "--alone", type=int, default=100, help="prompts of the runs at concurrency 1"
    )
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    arguments = parser.parse_args()
    prompts = first_turns(arguments.prompts, arguments.count)
    num_different = 0
    for dtype in arguments.dtypes:
        expected: dict[float, list[list[int]]] = {}
        for draft in ("none", "ngram", "standalone"):
            flags = ["--draft", draft, "--dtype", dtype, "--speculation", "fixed"]
            if draft == "standalone":
                flags += ["--draft-model", arguments.draft_model]
            for threshold in ("0",) if draft == "none" else ("0", "4"):
                with running_cluster(
                    *flags, "--speculative-disable-batch-threshold", threshold
                ) as cluster:
                    for temperature in TEMPERATURES:
                        for concurrency in (8, 1) if threshold == "0" else (8,):
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
                                f"{dtype} {draft} threshold {threshold} temperature {temperature} "
                                f"concurrency {concurrency}: {len(some)} prompts, {tokens} tokens, "
                                f"{tokens / seconds:.1f} tokens/s, {different} differ",
                                flush=True,
                            )
                    samples = cluster.metrics()
                    accepted = samples.get("outrider_accepted_tokens_total", 0.0)
                    drafted = samples.get("outrider_draft_tokens_total", 0.0)
                    speculative = samples.get('outrider_steps_total{mode="speculative"}', 0.0)
                    plain = samples.get('outrider_steps_total{mode="plain"}', 0.0)
                    print(
                        f"    accepted {accepted:.0f} of {drafted:.0f} draft tokens; "
                        f"steps: {speculative:.0f} speculative, {plain:.0f} plain",
                        flush=True,
                    )
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
