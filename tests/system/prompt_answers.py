"""Answers to the prompts of the system tests, as a client gets them."""

from concurrent.futures import ThreadPoolExecutor

from prompts import PROMPTS

from bench.cluster import Cluster


def answers(
    cluster: Cluster, temperature: float, concurrency: int, *, max_tokens: int, **request: object
) -> list[list[int]]:
    """Token ids by prompt, seeded by its index."""

    def one(index: int) -> list[int]:
        answer = cluster.complete(
            messages=[{"role": "user", "content": PROMPTS[index]}],
            temperature=temperature,
            seed=index,
            max_tokens=max_tokens,
            **request,
        )
        token_ids: list[int] = answer["choices"][0]["token_ids"]
        return token_ids

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, range(len(PROMPTS))))
