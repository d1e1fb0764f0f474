"""POST /v1/chat/completions and /v1/completions: a form in, OpenAI's answer out."""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.event_stream import DONE, ClientGone, EventStream, event, unless_gone
from gateway.generator import Generator
from gateway.http_body import BodyLimits, read_json
from gateway.openai_request import Delivery, chat_form, text_form
from gateway.openai_response import Answer, ChatShape, Shape, TextShape
from gateway.request import GenerationRequest
from gateway.rest_errors import error_object, error_response, json_response
from gateway.tool_answer import ToolChatShape
from outrider.serving.errors import ServiceError

# OpenAI's default for text completions; a chat may go on to the end of the context.
DEFAULT_TEXT_MAX_TOKENS = 16
# What nobody reads: nginx's number for a client that has closed the connection.
CLIENT_GONE_STATUS = 499


class Completions:
    """The two endpoints."""

    def __init__(self, generator: Generator, *, body_limits: BodyLimits) -> None:
        self._generator = generator
        self._body_limits = body_limits

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""

        async def respond() -> Response:
            self._generator.model()
            form = chat_form(await read_json(request, self._body_limits))
            self._generator.check_model(form.model)
            calling = None
            shape = ChatShape()
            if form.tools is not None:
                calling = self._generator.tool_calling(form.tools, form.options)
                shape = ToolChatShape(calling.make_reader())
            generation_request = await self._generator.chat_request(
                form.messages, form.options, _request_id(shape), calling
            )
            return await self._answer(request, generation_request, form.delivery, shape)

        return await answered(respond)

    async def text(self, request: Request) -> Response:
        """POST /v1/completions."""

        async def respond() -> Response:
            self._generator.model()
            form = text_form(await read_json(request, self._body_limits))
            self._generator.check_model(form.model)
            shape = TextShape()
            request_id = _request_id(shape)
            if isinstance(form.prompt, str):
                generation_request = await self._generator.text_request(
                    form.prompt,
                    form.options,
                    request_id,
                    default_max_tokens=DEFAULT_TEXT_MAX_TOKENS,
                )
            else:
                generation_request = await self._generator.token_request(
                    "prompt",
                    form.prompt,
                    form.options,
                    request_id,
                    default_max_tokens=DEFAULT_TEXT_MAX_TOKENS,
                )
            return await self._answer(request, generation_request, form.delivery, shape)

        return await answered(respond)

    async def _answer(
        self, request: Request, generation: GenerationRequest, delivery: Delivery, shape: Shape
    ) -> Response:
        model = self._generator.model()
        answer = Answer(
            shape, generation, model=model.name, system_fingerprint=model.system_fingerprint
        )
        if not delivery.is_streamed:
            body = self._whole(generation, delivery, answer)
            return await unless_gone(request.receive, body)
        events = self._events(generation, delivery, answer)
        first = await unless_gone(request.receive, anext(events))
        return EventStream(first, events)

    async def _whole(
        self, request: GenerationRequest, delivery: Delivery, answer: Answer
    ) -> Response:
        texts = []
        token_ids: list[int] = []
        finish_reason = 0
        async with self._generator.generate(request) as generation:
            async for piece in generation.pieces():
                texts.append(piece.text)
                token_ids.extend(piece.token_ids)
                finish_reason = piece.finish_reason
            return json_response(
                answer.whole(
                    "".join(texts),
                    token_ids if delivery.includes_token_ids else None,
                    finish_reason,
                    generation.usage,
                )
            )

    async def _events(
        self, request: GenerationRequest, delivery: Delivery, answer: Answer
    ) -> AsyncGenerator[bytes, None]:
        """The first event comes with the first token: until then an error is raised, afterwards
        it is an event.
        """
        opening = answer.first_piece()
        waiting = b"" if opening is None else event(opening)
        has_begun = False
        try:
            async with self._generator.generate(request) as generation:
                async for piece in generation.pieces():
                    body = answer.piece(piece, includes_token_ids=delivery.includes_token_ids)
                    if body is None:
                        continue
                    has_begun = True
                    yield waiting + event(body)
                    waiting = b""
                if delivery.includes_usage:
                    yield event(answer.usage(generation.usage))
        except ServiceError as error:
            if not has_begun:
                raise
            yield event(error_object(error))
        yield DONE


async def answered(respond: Callable[[], Awaitable[Response]]) -> Response:
    """The response, or the error that was raised instead of it as OpenAI writes one."""
    try:
        return await respond()
    except ServiceError as error:
        return error_response(error)
    except (ClientGone, ClientDisconnect):
        return Response(status_code=CLIENT_GONE_STATUS)


def _request_id(shape: Shape) -> str:
    return shape.prefix + secrets.token_hex(12)
