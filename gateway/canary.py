"""The canary: real requests through the Decode path, with drafts and without, compared.

Raises or reports; what a missing acceptance means is the caller's to decide.
"""

import asyncio
import time
from dataclasses import dataclass

from gateway.batcher import Batcher
from gateway.model import ServedModel, TextModel
from gateway.request import GenerationRequest, Options
from gateway.sequence_text import SequenceText, Usage
from gateway.tokens import generation_request
from outrider.serving.errors import ServiceError
from outrider.serving.sampling_parameters import SamplingParameters
from outrider.serving.tokenizer import Vocabulary
from outrider.v1 import generation_pb2

# Repetitive, so that any drafter has something to say.
PROMPT = "one two three four five six seven eight nine ten, " * 6
SHORT_TOKENS = 24
LONG_TOKENS = 64
SAMPLINGS = (
    ("greedy", SamplingParameters(temperature=0.0, seed=0)),
    ("sampled", SamplingParameters(temperature=0.8, seed=20_240_611)),
)
# It shows that drafts are right, not that they are fast: a slow draft service is no reason not to
# become ready, since the target does not wait for it.
PATIENCE_SECONDS = 5.0
# Before requests that wait at the target, so that load cannot starve it.
PRIORITY = 1


class CanaryFailed(RuntimeError):
    """The canary did not show what it must show."""


class CanaryUnanswered(CanaryFailed):
    """A canary request did not come to its end."""


class TokensDiffer(CanaryFailed):
    """A draft changed a token: what must never be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryRun:
    """One canary request's answer."""

    name: str
    token_ids: tuple[int, ...]
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReport:
    """What the canary found. The runs' tokens were equal with drafts and without, but for near
    ties at a target whose rounding depends on the rows of a step.
    """

    draft_length: int
    max_tokens: int
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    near_ties: tuple[str, ...]  # where runs part, in words
    seconds: float

    def words(self) -> str:
        """One line for the status."""
        if self.draft_length == 0:
            return f"{self.max_tokens} tokens, greedy and sampled, without drafts"
        return (
            f"{self.max_tokens} tokens, greedy and sampled, {self._compared()}; "
            f"{self.accepted_tokens} of {self.draft_tokens} draft tokens accepted in "
            f"{self.drafts} drafts"
        )

    def _compared(self) -> str:
        if not self.near_ties:
            return "equal with drafts and without"
        return (
            "equal with drafts and without up to a near tie, which this target's rounding decides "
            f"by the rows of a step ({'; '.join(self.near_ties)})"
        )


class Canary:
    """Runs canary requests for one model through one batcher."""

    def __init__(
        self,
        *,
        batcher: Batcher,
        model: ServedModel,
        text_model: TextModel,
        # With a bound of one decode row the target drafts for a lone sequence only.
        runs_together: bool,
        allows_near_ties: bool,
    ) -> None:
        self._batcher = batcher
        self._model = model
        self._vocabulary: Vocabulary = text_model.vocabulary
        self._runs_together = runs_together
        self._allows_near_ties = allows_near_ties

    async def run(
        self, *, draft_length: int, max_tokens: int, timeout_seconds: float
    ) -> CanaryReport:
        """Runs without drafts and, unless draft_length is 0, with them.

        Raises CanaryFailed, and TokensDiffer where the two are not the same.
        """
        started = time.monotonic()
        try:
            async with asyncio.timeout(timeout_seconds):
                plain = await self._runs(0, max_tokens, together=True)
                drafted: list[CanaryRun] = []
                if draft_length:
                    drafted = await self._runs(
                        draft_length, max_tokens, together=self._runs_together
                    )
        except TimeoutError as error:
            raise CanaryUnanswered(f"not finished after {timeout_seconds:.1f} s") from error
        near_ties = []
        for without, with_drafts in zip(plain, drafted, strict=False):
            difference = _difference(without, with_drafts)
            if difference is None:
                continue
            # The first token follows the prompt in both runs: no draft is beside it.
            if not self._allows_near_ties or without.token_ids[0] != with_drafts.token_ids[0]:
                raise TokensDiffer(difference)
            near_ties.append(difference)
        usages = [run.usage for run in drafted]
        accepted = sum(usage.accepted_prediction_tokens for usage in usages)
        return CanaryReport(
            draft_length=draft_length,
            max_tokens=max_tokens,
            drafts=sum(usage.drafts for usage in usages),
            draft_tokens=accepted + sum(usage.rejected_prediction_tokens for usage in usages),
            accepted_tokens=accepted,
            near_ties=tuple(near_ties),
            seconds=time.monotonic() - started,
        )

    async def _runs(self, draft_length: int, max_tokens: int, *, together: bool) -> list[CanaryRun]:
        runs = [
            self._run(f"{name}, draft length {draft_length}", sampling, draft_length, max_tokens)
            for name, sampling in SAMPLINGS
        ]
        if not together:
            return [await run for run in runs]
        return list(await asyncio.gather(*runs))

    async def _run(
        self, name: str, sampling: SamplingParameters, draft_length: int, max_tokens: int
    ) -> CanaryRun:
        request = self._request(name, sampling, draft_length, max_tokens)
        token_ids: list[int] = []
        text = SequenceText(request, self._vocabulary)
        try:
            sequence = self._batcher.submit_first(request)
            try:
                finish_reason = 0
                while not finish_reason:
                    for step in await sequence.take():
                        piece = text.push(step)
                        token_ids.extend(piece.token_ids)
                        finish_reason = piece.finish_reason
            finally:
                self._batcher.cancel(sequence)
        except ServiceError as error:
            raise CanaryUnanswered(f"{name}: {error}") from error
        if finish_reason != generation_pb2.FINISH_REASON_LENGTH:
            reason = generation_pb2.FinishReason.Name(finish_reason)
            raise CanaryFailed(f"{name}: it ended with {reason}, must be FINISH_REASON_LENGTH")
        if len(token_ids) != request.max_tokens:
            raise CanaryFailed(f"{name}: {len(token_ids)} tokens, must be {request.max_tokens}")
        return CanaryRun(name=name, token_ids=tuple(token_ids), usage=text.usage)

    def _request(
        self, name: str, sampling: SamplingParameters, draft_length: int, max_tokens: int
    ) -> GenerationRequest:
        context = self._model.max_sequence_length
        prompt = self._vocabulary.encode(PROMPT, parse_special=False, add_bos=True)
        # A context shorter than the canary gets a shorter canary.
        prompt = prompt[: max(1, context - max_tokens)]
        return generation_request(
            self._model,
            request_id=f"canary: {name}",
            field="prompt",
            prompt_token_ids=prompt,
            options=Options(
                sampling=sampling,
                max_tokens=min(max_tokens, context - len(prompt)),
                ignore_eos=True,
                draft_length=draft_length,
                patience_seconds=PATIENCE_SECONDS if draft_length else 0.0,
            ),
            default_max_tokens=None,
            priority=PRIORITY,
        )


def _difference(without: CanaryRun, with_drafts: CanaryRun) -> str | None:
    """The first token that is not the same, in words."""
    for position, (expected, actual) in enumerate(
        zip(without.token_ids, with_drafts.token_ids, strict=True)
    ):
        if expected != actual:
            return (
                f"token {position} is {actual} in the run '{with_drafts.name}', must be "
                f"{expected} as in the run '{without.name}'"
            )
    return None
