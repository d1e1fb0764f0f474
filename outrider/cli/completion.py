"""A chat answer over REST, streamed: pieces of text, then what it cost."""

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider.serving.access import OPEN_ACCESS, HttpAccess

TIMEOUT = httpx.Timeout(10.0, read=300.0)


class ServerError(Exception):
    """The server refused, was not there or broke off; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """What is asked; None = the server's default."""

    messages: Sequence[Mapping[str, str]]
    temperature: float | None
    seed: int | None
    max_tokens: int | None
    speculates: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What an answer cost, as the server and the clock tell."""

    completion_tokens: int
    accepted_tokens: int
    rejected_tokens: int
    drafts: int | None
    first_piece_seconds: float
    seconds: float

    def words(self) -> str:
        """One line. Acceptance length: tokens per verification, the target's own included."""
        parts = [
            f"{self.completion_tokens} tokens in {self.seconds:.2f} s",
            f"{self.completion_tokens / self.seconds:.1f} tokens/s",
            f"first after {self.first_piece_seconds:.2f} s",
        ]
        drafted = self.accepted_tokens + self.rejected_tokens
        if drafted == 0:
            parts.append("no drafts")
        else:
            if self.drafts:
                parts.append(f"{self.drafts} drafts")
            parts.append(
                f"{self.accepted_tokens} of {drafted} draft tokens accepted "
                f"({self.accepted_tokens / drafted:.0%})"
            )
            if self.drafts:
                parts.append(f"acceptance length {1 + self.accepted_tokens / self.drafts:.2f}")
        return ", ".join(parts)


def open_client(url: str, access: HttpAccess = OPEN_ACCESS) -> httpx.AsyncClient:
    """A client of the REST API at `url`."""
    return httpx.AsyncClient(
        base_url=url,
        timeout=TIMEOUT,
        trust_env=False,
        headers=access.headers,
        verify=access.verify,
    )


async def served_model(client: httpx.AsyncClient) -> str:
    """The name of the model that the server serves. Raises ServerError."""
    try:
        response = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerError(f"no server at {client.base_url}: {_reason(error)}") from error
    if response.status_code != httpx.codes.OK:
        raise ServerError(_refusal(response))
    return str(response.json()["data"][0]["id"])


async def drafts_total(client: httpx.AsyncClient) -> int:
    """Drafts verified since the server's start, from its metrics. Raises ServerError."""
    try:
        response = await client.get("/metrics")
    except httpx.HTTPError as error:
        raise ServerError(f"no server at {client.base_url}: {_reason(error)}") from error
    if response.status_code != httpx.codes.OK:
        raise ServerError(_refusal(response))
    return sum(
        int(sample.value)
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name == "outrider_drafts_total"
    )


async def stream_chat(
    client: httpx.AsyncClient, model: str, request: ChatRequest
) -> AsyncIterator[str | Figures]:
    """Pieces of the answer as they come and, last, the figures. Raises ServerError."""
    body: dict[str, object] = {
        "model": model,
        "messages": list(request.messages),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    for name, value in (
        ("temperature", request.temperature),
        ("seed", request.seed),
        ("max_tokens", request.max_tokens),
    ):
        if value is not None:
            body[name] = value
    if not request.speculates:
        body["speculation"] = {"draft_length": 0}
    started = time.monotonic()
    first_piece = 0.0
    usage = None
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                raise ServerError(_refusal(response))
            async for event in _events(response):
                if "error" in event:
                    raise ServerError(_message(event))
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    piece = choice["delta"].get("content")
                    if piece:
                        first_piece = first_piece or time.monotonic() - started
                        yield piece
    except httpx.HTTPError as error:
        raise ServerError(f"no answer from {client.base_url}: {_reason(error)}") from error
    if usage is None:
        raise ServerError("the answer broke off: no usage came")
    details = usage.get("completion_tokens_details") or {}
    yield Figures(
        completion_tokens=usage["completion_tokens"],
        accepted_tokens=details.get("accepted_prediction_tokens") or 0,
        rejected_tokens=details.get("rejected_prediction_tokens") or 0,
        drafts=details.get("drafts"),
        first_piece_seconds=first_piece,
        seconds=time.monotonic() - started,
    )


async def _events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if line.startswith("data:") and data != "[DONE]":
            yield json.loads(data)


def _refusal(response: httpx.Response) -> str:
    try:
        body = response.json()
    except ValueError:
        body = response.text
    return f"the server answered {response.status_code}: {_message(body)}"


def _message(body: object) -> str:
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        return str(body["error"].get("message"))
    return str(body)


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
