"""What the target's steps did, as the gateway holds it: one value per sequence and step."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.serving.columns import MalformedColumn, split, unpack
from outrider.v1 import generation_pb2, target_pb2

_LAST_FINISH_REASON = max(generation_pb2.FinishReason.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStep:
    """What one step did for one sequence. `finish_reason` is generation.proto's, 0 = goes on."""

    token_ids: Sequence[int]
    drafted_length: int
    accepted_length: int
    finish_reason: int
    # Of the prompt, with the first tokens; 0 in all other steps.
    cached_prompt_length: int = 0


def unpack_report(report: target_pb2.StepReport, vocab_size: int) -> list[tuple[int, SequenceStep]]:
    """Sequence ids with what the step did for each. Raises MalformedColumn."""
    sequence_ids = unpack("sequence_ids", report.sequence_ids, "<u8")
    count = len(sequence_ids)
    token_counts = unpack("emitted_counts", report.emitted_counts, "<u2", count)
    finish_reasons = unpack("finish_reasons", report.finish_reasons, "<u1", count)
    if finish_reasons and max(finish_reasons) > _LAST_FINISH_REASON:
        raise MalformedColumn(
            f"finish_reasons holds {max(finish_reasons)}, must be at most {_LAST_FINISH_REASON}"
        )
    all_token_ids = unpack("token_ids", report.token_ids, "<i4")
    if all_token_ids and not 0 <= min(all_token_ids) <= max(all_token_ids) < vocab_size:
        raise MalformedColumn(
            f"token_ids holds {min(all_token_ids)} to {max(all_token_ids)}, "
            f"must be between 0 and {vocab_size - 1}"
        )
    token_ids = split("token_ids", all_token_ids, token_counts)
    rows = zip(
        sequence_ids,
        token_ids,
        unpack("drafted_counts", report.drafted_counts, "<u1", count),
        unpack("accepted_counts", report.accepted_counts, "<u1", count),
        finish_reasons,
        (
            unpack("cached_prompt_counts", report.cached_prompt_counts, "<u4", count)
            if report.cached_prompt_counts
            else [0] * count
        ),
        strict=True,
    )
    return [
        (
            sequence_id,
            SequenceStep(
                token_ids=emitted,
                drafted_length=drafted,
                accepted_length=accepted,
                finish_reason=finish_reason,
                cached_prompt_length=cached,
            ),
        )
        for sequence_id, emitted, drafted, accepted, finish_reason, cached in rows
    ]
