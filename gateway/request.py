"""One request as the gateway's inside knows it: checked, tokenised, with its seed drawn."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.serving.columns import pack
from outrider.serving.sampling_parameters import SamplingParameters
from outrider.serving.structured_output import StructuredOutput
from outrider.v1 import sampling_pb2, target_pb2

# A drawn seed is exact in every JSON reader, JavaScript's doubles included.
DRAWN_SEED_BITS = 53


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedOutput:
    """What the text of an answer must look like, and the field that said so."""

    field: str
    output: StructuredOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What a client asked for besides the prompt; None = the default."""

    sampling: SamplingParameters
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    draft_length: int | None = None
    structured_output: RequestedOutput | None = None
    # How long a step may wait for a draft while nothing else decodes: for canaries only.
    patience_seconds: float = 0.0
    # Seconds from now; 0 = none.
    deadline_seconds: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """What is generated. `sampling.seed` is set; `max_tokens` fits the context."""

    request_id: str
    prompt_token_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParameters
    seed: int
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    draft_length: int | None = None
    patience_seconds: float = 0.0
    deadline_seconds: float = 0.0
    priority: int = 0
    structured_output: StructuredOutput | None = None
    # Special tokens in the output are part of the text.
    shows_special: bool = False

    def to_message(
        self,
        sequence_id: int,
        *,
        resumed_output_token_ids: Sequence[int],
        deadline_seconds: float,
    ) -> target_pb2.Admit:
        """The admission of this request as a sequence of the target, which goes on behind output
        that was emitted before. `deadline_seconds` are from now; 0 = none.
        """
        return target_pb2.Admit(
            sequence_id=sequence_id,
            prompt_token_ids=pack(self.prompt_token_ids, "<i4"),
            resumed_output_token_ids=pack(resumed_output_token_ids, "<i4"),
            max_tokens=self.max_tokens,
            sampling=self.sampling.to_message(),
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            min_tokens=self.min_tokens,
            deadline_seconds=deadline_seconds,
            priority=self.priority,
            structured_output=(
                None if self.structured_output is None else self.structured_output.to_message()
            ),
            speculation=(
                None
                if self.draft_length is None
                else sampling_pb2.SpeculationOverride(
                    draft_length=self.draft_length, patience_seconds=self.patience_seconds
                )
            ),
        )


def draw_seed() -> int:
    """A seed for a request that brought none; it is reported back."""
    return secrets.randbits(DRAWN_SEED_BITS)
