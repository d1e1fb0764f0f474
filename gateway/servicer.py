"""GenerationService: the gRPC side, with the same meaning as REST."""

import secrets
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc

from gateway.generation_message import options_from, parse_request
from gateway.generator import Generator
from gateway.request import GenerationRequest
from gateway.rest_errors import NOT_READY_RETRY_SECONDS
from gateway.sequence_text import Piece, Usage
from gateway.tool_message import chat_messages_from, response_parts, tool_request_from
from gateway.tool_reader import ToolReader, read
from outrider.serving.errors import InvalidArgument, NotServing, Overloaded, ServiceError
from outrider.v1 import generation_pb2

SERVICE_NAME = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name

Handler: TypeAlias = "grpc.RpcMethodHandler[bytes, generation_pb2.GenerateResponse]"


class GenerationServicer:
    """Generate. Bytes come in unparsed, so that malformed ones are INVALID_ARGUMENT as well."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def generate(
        self,
        data: bytes,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> AsyncIterator[generation_pb2.GenerateResponse]:
        """One answer; a client that goes away cancels it."""
        named = ""
        try:
            self._generator.model()
            message = parse_request(data)
            if message.request_id:
                named = f"request {message.request_id}: "
            request, reader = await self._request(message, context)
            async with self._generator.generate(request) as generation:
                async for piece in generation.pieces():
                    text, tool_calls = _said(piece, reader)
                    yield generation_pb2.GenerateResponse(
                        text=text,
                        token_ids=piece.token_ids,
                        tool_calls=tool_calls,
                        finished=(
                            _finished(piece.finish_reason, generation.usage, request.seed)
                            if piece.finish_reason
                            else None
                        ),
                    )
        except ServiceError as error:
            await context.abort(error.code, f"{named}{error}", _retry_after(error))

    async def _request(
        self,
        message: generation_pb2.GenerateRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> tuple[GenerationRequest, ToolReader | None]:
        """With what reads calls of functions out of the answer, if there may be any."""
        if message.model:
            self._generator.check_model(message.model)
        options = options_from(message, max(context.time_remaining() or 0.0, 0.0))
        request_id = message.request_id or f"grpc-{secrets.token_hex(12)}"
        kind = message.WhichOneof("input")
        if kind == "chat":
            tools = tool_request_from(message.chat)
            calling = None if tools is None else self._generator.tool_calling(tools, options)
            messages = chat_messages_from(message.chat)
            request = await self._generator.chat_request(messages, options, request_id, calling)
            return request, None if calling is None else calling.make_reader()
        if kind == "prompt":
            request = await self._generator.text_request(
                message.prompt, options, request_id, default_max_tokens=None
            )
            return request, None
        if kind == "prompt_token_ids":
            request = await self._generator.token_request(
                "prompt_token_ids",
                list(message.prompt_token_ids.ids),
                options,
                request_id,
                default_max_tokens=None,
            )
            return request, None
        raise InvalidArgument("input", None, "prompt, prompt_token_ids or chat")


def add_generation_servicer(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """Registers Generate, with requests left as bytes."""
    handler: Handler = grpc.unary_stream_rpc_method_handler(
        servicer.generate,
        request_deserializer=None,
        response_serializer=generation_pb2.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE_NAME, {"Generate": handler}),)
    )


def _said(
    piece: Piece, reader: ToolReader | None
) -> tuple[str, list[generation_pb2.ToolCallPiece]]:
    """Text for the user, and calls."""
    if reader is None:
        return piece.text, []
    return response_parts(read(reader, piece.text, is_last=bool(piece.finish_reason)))


def _finished(reason: int, usage: Usage, seed: int) -> generation_pb2.Finished:
    return generation_pb2.Finished(
        reason=generation_pb2.FinishReason.Name(reason),
        usage=generation_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            accepted_prediction_tokens=usage.accepted_prediction_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens,
            drafts=usage.drafts,
            cached_prompt_tokens=usage.cached_prompt_tokens,
        ),
        seed=seed,
    )


def _retry_after(error: ServiceError) -> tuple[tuple[str, str], ...]:
    if isinstance(error, Overloaded):
        return (("retry-after", f"{error.retry_after_seconds:.0f}"),)
    if isinstance(error, NotServing):
        return (("retry-after", str(NOT_READY_RETRY_SECONDS)),)
    return ()
