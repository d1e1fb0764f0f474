"""The edge: an Admit message into a checked Request, or InvalidArgument by field, value and
bound.
"""

import time
from dataclasses import dataclass

import numpy as np

from outrider.engine.logit_rules import LogitRules
from outrider.engine.sampling import Sampling
from outrider.serving.columns import MalformedColumn, unpack
from outrider.serving.errors import InvalidArgument
from outrider.serving.grammar_compiler import Grammar
from outrider.serving.link_protocol import TOKEN_ID
from outrider.serving.sampling_parameters import SamplingParameters, sampling_parameters_from
from outrider.v1 import target_pb2
from target_service.sequence import ReportSink, Request

MAX_PATIENCE_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionBounds:
    """What a request must keep to."""

    vocab_size: int
    max_sequence_length: int
    max_draft_length: int
    eos_token_ids: frozenset[int]
    max_patience_seconds: float


def request_from(
    message: target_pb2.Admit,
    sink: ReportSink,
    bounds: AdmissionBounds,
    grammar: Grammar | None = None,
) -> Request:
    """Checks one admission; `grammar` is its structured output. Raises InvalidArgument."""
    if grammar is not None and message.ignore_eos:
        raise InvalidArgument("ignore_eos", True, "false with structured_output, which ends there")
    if grammar is not None and message.min_tokens:
        raise InvalidArgument("min_tokens", message.min_tokens, "0 with structured_output")
    prompt = _token_ids("prompt_token_ids", message.prompt_token_ids, bounds)
    resumed = _token_ids("resumed_output_token_ids", message.resumed_output_token_ids, bounds)
    if not prompt:
        raise InvalidArgument("prompt_token_ids", [], "at least one token")
    max_tokens = min(message.max_tokens, bounds.max_sequence_length - len(prompt))
    if max_tokens <= len(resumed):
        raise InvalidArgument(
            "max_tokens", message.max_tokens, f"above the {len(resumed)} resumed output tokens"
        )
    parameters = sampling_parameters_from(message.sampling)
    if parameters.seed is None:
        raise InvalidArgument("sampling.seed", None, "set by the gateway")
    return Request(
        sink=sink,
        sequence_id=message.sequence_id,
        prompt_token_ids=prompt,
        resumed_output_token_ids=resumed,
        max_tokens=max_tokens,
        sampling=Sampling(
            temperature=parameters.temperature,
            top_k=parameters.top_k,
            top_p=parameters.top_p,
            min_p=parameters.min_p,
            seed=parameters.seed,
        ),
        rules=_rules(message, parameters, bounds),
        grammar=grammar,
        stop_token_ids=_stop_token_ids(message, bounds),
        deadline=_deadline(message.deadline_seconds),
        priority=message.priority,
        draft_length_override=_draft_length_override(message, bounds),
        patience_seconds=_patience_seconds(message, bounds),
    )


def _token_ids(field: str, column: bytes, bounds: AdmissionBounds) -> tuple[int, ...]:
    # Before anything is unpacked: the event loop must not be kept by a prompt that cannot fit.
    num_tokens = len(column) // np.dtype(TOKEN_ID).itemsize
    if num_tokens >= bounds.max_sequence_length:
        raise InvalidArgument(
            field, f"{num_tokens} tokens", f"at most {bounds.max_sequence_length - 1}"
        )
    try:
        token_ids = unpack(field, column, TOKEN_ID)
    except MalformedColumn as error:
        raise InvalidArgument(field, f"{len(column)} bytes", "packed int32") from error
    for token_id in token_ids:
        if not 0 <= token_id < bounds.vocab_size:
            raise InvalidArgument(field, token_id, f"between 0 and {bounds.vocab_size - 1}")
    return tuple(token_ids)


def _rules(
    message: target_pb2.Admit, parameters: SamplingParameters, bounds: AdmissionBounds
) -> LogitRules | None:
    for token_id, _ in parameters.logit_bias:
        if token_id >= bounds.vocab_size:
            raise InvalidArgument("logit_bias", token_id, f"below {bounds.vocab_size}")
    ending = _ending_token_ids(message, bounds)
    rules = LogitRules(
        presence_penalty=parameters.presence_penalty,
        frequency_penalty=parameters.frequency_penalty,
        repetition_penalty=parameters.repetition_penalty,
        logit_bias=parameters.logit_bias,
        min_tokens=message.min_tokens if ending else 0,
        ending_token_ids=ending,
    )
    return None if rules.are_neutral else rules


def _ending_token_ids(message: target_pb2.Admit, bounds: AdmissionBounds) -> tuple[int, ...]:
    """What cannot be drawn before min_tokens; empty without them."""
    if not message.min_tokens:
        return ()
    if message.min_tokens > message.max_tokens:
        raise InvalidArgument(
            "min_tokens", message.min_tokens, f"at most max_tokens, {message.max_tokens}"
        )
    ending = _stop_token_ids(message, bounds)
    if len(ending) >= bounds.vocab_size:
        raise InvalidArgument("min_tokens", message.min_tokens, "0 where every token is a stop")
    return tuple(sorted(ending))


def _stop_token_ids(message: target_pb2.Admit, bounds: AdmissionBounds) -> frozenset[int]:
    for token_id in message.stop_token_ids:
        if token_id >= bounds.vocab_size:
            raise InvalidArgument("stop_token_ids", token_id, f"below {bounds.vocab_size}")
    stops = frozenset(message.stop_token_ids)
    return stops if message.ignore_eos else stops | bounds.eos_token_ids


def _deadline(seconds: float) -> float | None:
    if seconds == 0:
        return None
    if not seconds > 0:
        raise InvalidArgument("deadline_seconds", seconds, "0 or above")
    return time.monotonic() + seconds


def _patience_seconds(message: target_pb2.Admit, bounds: AdmissionBounds) -> float:
    seconds = message.speculation.patience_seconds
    if not 0 <= seconds <= MAX_PATIENCE_SECONDS:
        raise InvalidArgument(
            "speculation.patience_seconds", seconds, f"between 0 and {MAX_PATIENCE_SECONDS:g}"
        )
    # The wait is part of a step, and a step that takes too long is the end of the service.
    return min(seconds, bounds.max_patience_seconds)


def _draft_length_override(message: target_pb2.Admit, bounds: AdmissionBounds) -> int | None:
    if not message.HasField("speculation") or not message.speculation.HasField("draft_length"):
        return None
    draft_length = message.speculation.draft_length
    if draft_length > bounds.max_draft_length:
        raise InvalidArgument(
            "speculation.draft_length", draft_length, f"at most {bounds.max_draft_length}"
        )
    return draft_length
