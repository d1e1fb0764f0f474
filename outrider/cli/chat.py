"""`outrider chat`: one question or a conversation with a running server."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import httpx

from outrider.cli.completion import (
    ChatRequest,
    Figures,
    ServerError,
    open_client,
    served_model,
    stream_chat,
)
from outrider.serving.access import OPEN_ACCESS, HttpAccess

PROMPT = "> "


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How answers are to be made; None = the server's default."""

    temperature: float | None
    seed: int | None
    max_tokens: int | None
    speculates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer that was streamed to the end."""

    text: str
    figures: Figures


async def converse(
    url: str, question: str | None, options: ChatOptions, access: HttpAccess = OPEN_ACCESS
) -> int:
    """Answers to standard output, figures and errors to standard error; returns the exit code."""
    try:
        async with open_client(url, access) as client:
            model = await served_model(client)
            if question is not None:
                await _turn(client, model, [], question, options)
                return 0
            await _conversation(client, model, options)
    except ServerError as error:
        print(f"outrider chat: {error}", file=sys.stderr)
        return 1
    return 0


async def stream_answer(
    client: httpx.AsyncClient,
    model: str,
    messages: Sequence[Mapping[str, str]],
    options: ChatOptions,
) -> Answer:
    """Prints an answer as it comes. Raises ServerError."""
    request = ChatRequest(
        messages=messages,
        temperature=options.temperature,
        seed=options.seed,
        max_tokens=options.max_tokens,
        speculates=options.speculates,
    )
    pieces: list[str] = []
    figures: Figures | None = None
    async for piece in stream_chat(client, model, request):
        if isinstance(piece, Figures):
            figures = piece
        else:
            pieces.append(piece)
            print(piece, end="", flush=True)
    print(flush=True)
    assert figures is not None
    return Answer(text="".join(pieces), figures=figures)


async def _conversation(client: httpx.AsyncClient, model: str, options: ChatOptions) -> None:
    print(f"{model} at {client.base_url}; Ctrl-D ends", file=sys.stderr)
    messages: list[Mapping[str, str]] = []
    while True:
        try:
            # On the loop's own thread: nothing else runs while a person types.
            question = input(PROMPT).strip()
        except EOFError:
            print(file=sys.stderr)
            return
        if question:
            try:
                messages = await _turn(client, model, messages, question, options)
            except ServerError as error:
                print(f"\n{error}", file=sys.stderr)


async def _turn(
    client: httpx.AsyncClient,
    model: str,
    messages: Sequence[Mapping[str, str]],
    question: str,
    options: ChatOptions,
) -> list[Mapping[str, str]]:
    asked = [*messages, {"role": "user", "content": question}]
    answer = await stream_answer(client, model, asked, options)
    print(f"[{answer.figures.words()}]", file=sys.stderr, flush=True)
    return [*asked, {"role": "assistant", "content": answer.text}]
