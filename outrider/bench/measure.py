"""One server under every load of a benchmark."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from outrider.bench.answer import Answer, Question, ask
from outrider.bench.counters import read_counters
from outrider.bench.figures import Figures, figures_of
from outrider.bench.load import Load, run_load
from outrider.bench.prompts import in_order
from outrider.serving.access import OPEN_ACCESS, HttpAccess

# A server may think for long before its first token, under load.
TIMEOUT = httpx.Timeout(30.0, read=600.0, pool=None)


class BenchError(Exception):
    """The server cannot be measured; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is asked of every server that is measured."""

    prompts: Sequence[str]
    loads: Sequence[Load]
    requests: int  # of a run; 0 = four times its load, at least as many as there are prompts
    warm_up: int  # requests before each run; -1 = as many as the load
    max_tokens: int
    temperature: float
    is_chat: bool
    ignores_eos: bool
    seed: int
    model: str  # empty: the first that the server lists
    access: HttpAccess = OPEN_ACCESS

    def count(self, load: Load) -> int:
        """Requests of a run."""
        return self.requests or max(len(self.prompts), 4 * load.concurrency)

    def warm_up_count(self, load: Load) -> int:
        """Requests before it, whose answers are not counted."""
        return self.warm_up if self.warm_up >= 0 else max(1, load.concurrency)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run of one server."""

    name: str  # of the server or of its mode
    load: Load
    repetition: int
    figures: Figures


async def measure(
    url: str,
    plan: Plan,
    *,
    name: str,
    repetition: int,
    advance: Callable[[str], None],
) -> list[Measured]:
    """All loads of the plan, one after another. `advance` hears of every answer, with its load.
    Raises BenchError where nothing can be measured; single requests that fail are counted.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=url,
        timeout=TIMEOUT,
        trust_env=False,
        limits=limits,
        headers=plan.access.headers,
        verify=plan.access.verify,
    ) as client:
        question = Question(
            model=plan.model or await served_model(client),
            is_chat=plan.is_chat,
            max_tokens=plan.max_tokens,
            temperature=plan.temperature,
            ignores_eos=plan.ignores_eos,
        )
        measured = []
        for load in plan.loads:
            figures = await _measure(client, plan, question, load, repetition, advance)
            if figures.errors == figures.requests:
                raise BenchError(f"{url}: every request failed, the first: {figures.first_error}")
            measured.append(Measured(name=name, load=load, repetition=repetition, figures=figures))
        return measured


async def _measure(
    client: httpx.AsyncClient,
    plan: Plan,
    question: Question,
    load: Load,
    repetition: int,
    advance: Callable[[str], None],
) -> Figures:
    count, before = plan.count(load), plan.warm_up_count(load)
    # The same for every server and mode; another with each repetition.
    seed = plan.seed + repetition
    prompts = in_order(plan.prompts, before + count, seed)

    def asking(first: int) -> Callable[[int], Any]:
        async def one(index: int) -> Answer:
            return await ask(client, question, prompts[first + index], seed + first + index)

        return one

    def heard() -> None:
        advance(load.words())

    if before:
        warm = load if load.concurrency else Load(concurrency=min(before, 8))
        await run_load(warm, before, asking(0), seed=seed, progress=heard)
    counted = await read_counters(client)
    run = await run_load(load, count, asking(before), seed=seed, progress=heard)
    now = None if counted is None else await read_counters(client)
    return figures_of(run, None if now is None or counted is None else now.since(counted))


async def served_model(client: httpx.AsyncClient) -> str:
    """The first model that a server lists. Raises BenchError."""
    try:
        response = await client.get("/v1/models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise BenchError(
            f"no server at {client.base_url}: {error or type(error).__name__}"
        ) from error
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{client.base_url} lists no model; name one with --model") from error
