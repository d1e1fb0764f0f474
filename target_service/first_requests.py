"""The target's own first requests, run before it says SERVING: the step loop itself, plain and
with drafts.

The engine has proved its forward; this proves scheduling, verification and commitment on top of it.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from outrider.engine.boot import Engine
from outrider.engine.sampling import Sampling
from target_service.drafts import NOTHING_COLLECTED, Collected
from target_service.no_drafts import NoDrafts
from target_service.policy import Policy
from target_service.scheduler import Scheduler, SchedulerBounds
from target_service.sequence import Outcome, Request, StepSummary
from target_service.sequence import Sequence as TokenSequence
from target_service.statistics import Statistics
from target_service.step_loop import StepLoop

PROMPT_LENGTH = 24
OUTPUT_TOKENS = 16
# Every so many tokens the replayed draft is made wrong, so that rejection is exercised as well.
WRONG_TOKEN_PERIOD = 5


class FirstRequestsFailed(RuntimeError):
    """The step loop gave different tokens with and without drafts, or none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstRequests:
    """Evidence: the tokens of a plain request, and how many of them came from drafts the second
    time.
    """

    token_ids: tuple[int, ...]
    drafted_tokens: int
    accepted_tokens: int


class _ReplayedDrafts(NoDrafts):
    """A DraftSource that proposes a known output, with a wrong token now and then."""

    def __init__(self, known: Sequence[int], prompt_length: int, vocab_size: int) -> None:
        self._known = known
        self._prompt_length = prompt_length
        self._vocab_size = vocab_size
        self._lengths: dict[int, int] = {}

    def unavailable(self, *, patience_seconds: float) -> str | None:
        return None

    def ask(
        self,
        sequences: Sequence[TokenSequence],
        draft_lengths: Mapping[int, int],
        *,
        decode_rows: int,
        patience_seconds: float,
    ) -> bool:
        self._lengths = dict(draft_lengths)
        return True

    def collect(
        self, sequences: Sequence[TokenSequence], *, has_news: Callable[[], bool]
    ) -> Collected:
        if not self._lengths:
            return NOTHING_COLLECTED
        drafts = {}
        for sequence in sequences:
            emitted = sequence.committed_length - self._prompt_length
            continuation = self._known[emitted : emitted + self._lengths[sequence.arrival]]
            drafts[sequence.arrival] = tuple(
                (token_id + 1) % self._vocab_size
                if (emitted + index) % WRONG_TOKEN_PERIOD == WRONG_TOKEN_PERIOD - 1
                else token_id
                for index, token_id in enumerate(continuation)
            )
        return Collected(drafts=drafts, waited_seconds=0.0, is_answered=True)


class _Collector:
    """A ReportSink that keeps what it is told."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_finished = False

    def report(self, outcomes: Sequence[Outcome], step: StepSummary) -> None:
        for outcome in outcomes:
            self.token_ids.extend(outcome.emitted_token_ids)
            self.is_finished = outcome.finish_reason != 0

    def reject(self, sequence_id: int, reason: int, message: str) -> None:
        raise FirstRequestsFailed(f"the first request was rejected: {message}")


def run_first_requests(engine: Engine, max_draft_length: int) -> FirstRequests:
    """Decodes one request plainly and again with drafts. Raises FirstRequestsFailed if their
    tokens differ.
    """
    vocab_size = engine.model_config.vocab_size
    prompt_length = min(PROMPT_LENGTH, engine.limits.max_sequence_length // 2)
    num_tokens = min(OUTPUT_TOKENS, engine.limits.max_sequence_length - prompt_length)
    prompt = tuple(1 + index % 7 * 11 % (vocab_size - 1) for index in range(prompt_length))
    statistics = Statistics(max(max_draft_length, 1))
    plain = _run(engine, prompt, num_tokens, _ReplayedDrafts((), 0, vocab_size), 0, statistics)
    if max_draft_length:
        drafts = _ReplayedDrafts(plain, prompt_length, vocab_size)
        drafted = _run(engine, prompt, num_tokens, drafts, max_draft_length, statistics)
        if drafted[0] != plain[0] or (drafted != plain and not engine.rounding_depends_on_rows):
            raise FirstRequestsFailed(f"plain decoding gave {plain}, with drafts {drafted}")
        if num_tokens > 2 and not statistics.accepted_tokens:
            raise FirstRequestsFailed("no token of a known continuation was accepted")
    if engine.block_pool.num_used:
        raise FirstRequestsFailed(f"{engine.block_pool.num_used} KV blocks were not given back")
    return FirstRequests(
        token_ids=plain,
        drafted_tokens=statistics.draft_tokens,
        accepted_tokens=statistics.accepted_tokens,
    )


def _run(
    engine: Engine,
    prompt: tuple[int, ...],
    num_tokens: int,
    drafts: _ReplayedDrafts,
    draft_length: int,
    statistics: Statistics,
) -> tuple[int, ...]:
    loop = StepLoop(
        engine=engine.steps,
        ahead=engine.ahead,
        scheduler=Scheduler(
            engine.block_pool,
            SchedulerBounds(
                max_running_sequences=1,
                max_waiting_sequences=1,
                max_step_rows=engine.limits.max_step_rows,
                max_prefill_rows=engine.limits.max_step_rows,
                block_size=engine.limits.block_size,
                # The second run shall compute what the first did.
                caches_prefixes=False,
            ),
            on_preempt=drafts.stopped,
        ),
        drafts=drafts,
        statistics=statistics,
        max_step_rows=engine.limits.max_step_rows,
        activity=lambda name: nullcontext(),
    )
    sink = _Collector()
    loop.set_policy(Policy(rules=((1, draft_length),)))
    loop.admit(
        [
            Request(
                sink=sink,
                sequence_id=1,
                prompt_token_ids=prompt,
                resumed_output_token_ids=(),
                max_tokens=num_tokens,
                sampling=Sampling(temperature=0.0),
                stop_token_ids=frozenset(),
                deadline=None,
                priority=0,
                draft_length_override=None,
                patience_seconds=0.0,
            )
        ]
    )
    while not sink.is_finished:
        loop.step()
    return tuple(sink.token_ids)
