"""The text of one answer as its tokens come: characters, stop strings, end tokens and counts."""

from dataclasses import dataclass

from gateway.detokenizer import Detokenizer
from gateway.request import GenerationRequest
from gateway.step import SequenceStep
from gateway.stop_strings import StopStrings
from outrider.serving.tokenizer import Vocabulary
from outrider.v1 import generation_pb2


@dataclass(slots=True, kw_only=True)
class Usage:
    """Token counts of one answer so far. A draft token behind a stop string was not used."""

    prompt_tokens: int
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    drafts: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text and tokens. `finish_reason` is generation.proto's, 0 = goes on."""

    text: str
    token_ids: list[int]
    finish_reason: int


class SequenceText:
    """Turns a sequence's steps into pieces; nothing comes behind a stop string."""

    def __init__(self, request: GenerationRequest, vocabulary: Vocabulary) -> None:
        self.usage = Usage(prompt_tokens=len(request.prompt_token_ids))
        self._detokenizer = Detokenizer(
            vocabulary, skip_special=not request.shows_special, continues_text=True
        )
        self._min_tokens = request.min_tokens
        self._stop_strings = StopStrings(request.stop) if request.stop else None

    def push(self, step: SequenceStep) -> Piece:
        """The piece that a step adds. With a stop string complete it is the last one."""
        token_ids = list(step.token_ids)
        is_stopped_by_token = step.finish_reason == generation_pb2.FINISH_REASON_STOP
        # The token that ended the sequence is counted, but it is no text.
        shown = token_ids[:-1] if is_stopped_by_token else token_ids
        text, used = self._text(shown)
        is_stopped_by_text = used is not None
        if used is not None:
            token_ids = token_ids[:used]
        elif step.finish_reason:
            rest, is_stopped_by_text = self._rest(len(token_ids))
            text += rest
        self._count(step, len(token_ids))
        return Piece(
            text=text,
            token_ids=token_ids,
            finish_reason=(
                generation_pb2.FINISH_REASON_STOP if is_stopped_by_text else step.finish_reason
            ),
        )

    def _text(self, token_ids: list[int]) -> tuple[str, int | None]:
        """New text, and how many of the tokens were used where a stop string became complete."""
        if self._stop_strings is None:
            return self._detokenizer.push(token_ids), None
        parts = []
        for used, token_id in enumerate(token_ids, start=1):
            part, is_stopped = self._stop_strings.push(
                self._detokenizer.push((token_id,)), may_stop=self._may_stop(used)
            )
            parts.append(part)
            if is_stopped:
                return "".join(parts), used
        return "".join(parts), None

    def _may_stop(self, new_tokens: int) -> bool:
        """Whether so many more make the output as long as it has to be."""
        return self.usage.completion_tokens + new_tokens >= self._min_tokens

    def _rest(self, new_tokens: int) -> tuple[str, bool]:
        """What was held back at the end; whether the last half character completed a stop."""
        rest = self._detokenizer.finish()
        if self._stop_strings is None:
            return rest, False
        rest, is_stopped = self._stop_strings.push(rest, may_stop=self._may_stop(new_tokens))
        return rest + self._stop_strings.finish(), is_stopped

    def _count(self, step: SequenceStep, used: int) -> None:
        accepted = min(step.accepted_length, used)
        self.usage.completion_tokens += used
        self.usage.cached_prompt_tokens += step.cached_prompt_length
        self.usage.accepted_prediction_tokens += accepted
        self.usage.rejected_prediction_tokens += step.drafted_length - accepted
        self.usage.drafts += step.drafted_length > 0
