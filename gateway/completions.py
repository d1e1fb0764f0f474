"""POST /v1/chat/completions and /v1/completions: a form in, OpenAI's answer out."""

import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from gateway.choices import Choices
from gateway.event_stream import DONE, ClientGone, EventStream, event, unless_gone
from gateway.generator import Generator
from gateway.http_body import BodyLimits, read_json
from gateway.openai_request import Delivery, TextForm, chat_form, text_form
from gateway.openai_response import Answer, ChatShape, Shape, TextShape, WholeChoice
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

    def __init__(
        self, generator: Generator, *, body_limits: BodyLimits, keep_alive_seconds: float
    ) -> None:
        self._generator = generator
        self._body_limits = body_limits
        self._keep_alive_seconds = keep_alive_seconds

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""

        async def respond() -> Response:
            self._generator.model()
            form = chat_form(await read_json(request, self._body_limits))
            self._generator.check_model(form.model)
            calling = None
            make_shape: Callable[[], Shape] = ChatShape
            if form.tools is not None:
                calling = self._generator.tool_calling(form.tools, form.options)
                make_reader = calling.make_reader

                def make_shape() -> Shape:
                    return ToolChatShape(make_reader())

            generation_request = await self._generator.chat_request(
                form.messages, form.options, _request_id(ChatShape), calling
            )
            return await self._answer(request, [generation_request], form.delivery, make_shape)

        return await answered(respond)

    async def text(self, request: Request) -> Response:
        """POST /v1/completions."""

        async def respond() -> Response:
            self._generator.model()
            form = text_form(await read_json(request, self._body_limits))
            self._generator.check_model(form.model)
            prompts = await self._prompts(form, _request_id(TextShape))
            return await self._answer(request, prompts, form.delivery, TextShape)

        return await answered(respond)

    async def _prompts(self, form: TextForm, request_id: str) -> list[GenerationRequest]:
        """One request a prompt, all with the same seed: they are as if asked one by one."""
        prompts: list[GenerationRequest] = []
        options = form.options
        for prompt in form.prompts:
            if isinstance(prompt, str):
                one = await self._generator.text_request(
                    prompt, options, request_id, default_max_tokens=DEFAULT_TEXT_MAX_TOKENS
                )
            else:
                one = await self._generator.token_request(
                    "prompt", prompt, options, request_id,
                    default_max_tokens=DEFAULT_TEXT_MAX_TOKENS,
                )  # fmt: skip
            prompts.append(one)
            # Drawn once where none was given: it is told once.
            options = replace(options, sampling=replace(options.sampling, seed=one.seed))
        return prompts

    async def _answer(
        self,
        request: Request,
        prompts: Sequence[GenerationRequest],
        delivery: Delivery,
        make_shape: Callable[[], Shape],
    ) -> Response:
        model = self._generator.model()
        shapes = [make_shape() for _ in range(len(prompts) * delivery.num_choices)]
        answer = Answer(
            shapes, prompts[0], model=model.name, system_fingerprint=model.system_fingerprint
        )
        choices = Choices(prompts, delivery.num_choices, self._generator.generate)
        if not delivery.is_streamed:
            body = self._whole(choices, len(shapes), delivery, answer)
            return await unless_gone(request.receive, body)
        events = self._events(choices, delivery, answer)
        first = await unless_gone(request.receive, anext(events))
        return EventStream(first, events, keep_alive_seconds=self._keep_alive_seconds)

    async def _whole(
        self, choices: Choices, num_choices: int, delivery: Delivery, answer: Answer
    ) -> Response:
        texts: list[list[str]] = [[] for _ in range(num_choices)]
        token_ids: list[list[int]] = [[] for _ in range(num_choices)]
        finish_reasons = [0] * num_choices
        async with aclosing(choices.pieces()) as pieces:
            async for index, piece in pieces:
                texts[index].append(piece.text)
                token_ids[index].extend(piece.token_ids)
                finish_reasons[index] = piece.finish_reason
        whole = [
            WholeChoice(
                text="".join(texts[index]),
                token_ids=token_ids[index],
                finish_reason=finish_reasons[index],
            )
            for index in range(num_choices)
        ]
        return json_response(
            answer.whole(whole, choices.usage, includes_token_ids=delivery.includes_token_ids)
        )

    async def _events(
        self, choices: Choices, delivery: Delivery, answer: Answer
    ) -> AsyncGenerator[bytes, None]:
        """The first event comes with the first token: until then an error is raised, afterwards
        it is an event.
        """
        waiting = b"".join(map(event, answer.first_pieces()))
        has_begun = False
        try:
            async with aclosing(choices.pieces()) as pieces:
                async for index, piece in pieces:
                    body = answer.piece(
                        index, piece, includes_token_ids=delivery.includes_token_ids
                    )
                    if body is None:
                        continue
                    has_begun = True
                    yield waiting + event(body)
                    waiting = b""
            if delivery.includes_usage:
                yield event(answer.usage(choices.usage))
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


def _request_id(shape: type[Shape]) -> str:
    return shape.prefix + secrets.token_hex(12)
