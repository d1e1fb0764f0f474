"""One answer from submission to its last piece: what REST and gRPC share."""

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.batcher import Batcher
from gateway.request import GenerationRequest
from gateway.sequence import Sequence
from gateway.sequence_text import Piece, SequenceText, Usage
from gateway.stats import Statistics
from outrider.serving.errors import NotServing, ServiceError
from outrider.serving.tokenizer import Vocabulary
from outrider.v1 import generation_pb2

logger = logging.getLogger(__name__)

_OUTCOMES: dict[int, str] = {
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
    generation_pb2.FINISH_REASON_DEADLINE: "deadline",
}


class Generation:
    """An answer that is being generated. Made by `generating`."""

    def __init__(self, sequence: Sequence, text: SequenceText) -> None:
        self.request = sequence.request
        self.outcome = "cancelled"
        self._sequence = sequence
        self._text = text

    @property
    def usage(self) -> Usage:
        """The counts so far."""
        return self._text.usage

    async def pieces(self) -> AsyncIterator[Piece]:
        """The pieces; the last one has a finish reason. What a slow reader left comes as one.

        Raises ServiceError if the answer cannot be completed.
        """
        while True:
            try:
                steps = await self._sequence.take()
            except ServiceError:
                self.outcome = "error"
                raise
            piece = self._text.push(steps[0])
            for step in steps[1:]:
                if piece.finish_reason:
                    break
                piece = _joined(piece, self._text.push(step))
            if piece.finish_reason == generation_pb2.FINISH_REASON_CANCELLED:
                self.outcome = "error"
                raise NotServing("target: it ended the sequence")
            if piece.finish_reason:
                self.outcome = _OUTCOMES[piece.finish_reason]
            yield piece
            if piece.finish_reason:
                return


@asynccontextmanager
async def generating(
    request: GenerationRequest, batcher: Batcher, vocabulary: Vocabulary, statistics: Statistics
) -> AsyncIterator[Generation]:
    """Submits a request; whatever ends the block early cancels it at the target.

    Raises Overloaded or NotServing.
    """
    try:
        sequence = batcher.submit(request)
    except ServiceError:
        statistics.requests["rejected"] += 1
        raise
    generation = Generation(sequence, SequenceText(request, vocabulary))
    try:
        yield generation
    finally:
        sequence.cancel()
        statistics.requests[generation.outcome] += 1
        usage = generation.usage
        logger.debug(
            "request %s: %s after %.3f s, %d prompt tokens, %d completion tokens, %d drafted right",
            request.request_id,
            generation.outcome,
            time.monotonic() - sequence.submitted_at,
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.accepted_prediction_tokens,
        )


def _joined(first: Piece, second: Piece) -> Piece:
    return Piece(
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        finish_reason=second.finish_reason,
    )
