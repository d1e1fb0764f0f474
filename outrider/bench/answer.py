"""One streamed request to an OpenAI-compatible server, and when its pieces came."""

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What every request of a benchmark has in common."""

    model: str
    is_chat: bool
    max_tokens: int
    temperature: float
    ignores_eos: bool  # a server's own parameter, which not every one knows

    def body(self, prompt: str, seed: int) -> dict[str, Any]:
        """Of one request."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = prompt
        if self.ignores_eos:
            body["ignore_eos"] = True
        return body

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"


@dataclass(slots=True, kw_only=True)
class Answer:
    """One request's fate. Times are time.perf_counter seconds."""

    asked: float
    ended: float = 0.0
    # When each piece with text came.
    pieces: list[float] = field(default_factory=list)
    # As the server counts; without its word, the pieces.
    output_tokens: int = 0
    cached_tokens: int = 0
    prompt_tokens: int = 0
    error: str = ""

    @property
    def first_token_seconds(self) -> float:
        return self.pieces[0] - self.asked

    @property
    def seconds(self) -> float:
        return self.ended - self.asked

    @property
    def inter_token_seconds(self) -> float | None:
        """Mean time between two tokens; None for an answer of one."""
        if self.output_tokens < 2 or len(self.pieces) < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.output_tokens - 1)


async def ask(client: httpx.AsyncClient, question: Question, prompt: str, seed: int) -> Answer:
    """Asks once and reads to the end. What goes wrong is the answer's error."""
    answer = Answer(asked=time.perf_counter())
    try:
        async with client.stream(
            "POST", question.path, json=question.body(prompt, seed)
        ) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                answer.error = f"status {response.status_code}: {text[:200]}"
            else:
                await _read(response, answer)
    except httpx.HTTPError as error:
        answer.error = str(error) or type(error).__name__
    except ValueError as error:
        answer.error = f"the stream is no JSON: {error}"
    answer.ended = time.perf_counter()
    if not answer.error and not answer.pieces:
        answer.error = "an answer without text"
    return answer


async def _read(response: httpx.Response, answer: Answer) -> None:
    usage: Mapping[str, Any] | None = None
    async for event in events(response):
        if "error" in event:
            answer.error = str(event["error"])[:200]
            return
        if any(_has_text(choice) for choice in event.get("choices") or ()):
            answer.pieces.append(time.perf_counter())
        usage = event.get("usage") or usage
    if usage is None:
        answer.output_tokens = len(answer.pieces)
        return
    answer.output_tokens = int(usage.get("completion_tokens") or 0)
    answer.prompt_tokens = int(usage.get("prompt_tokens") or 0)
    details = usage.get("prompt_tokens_details") or {}
    answer.cached_tokens = int(details.get("cached_tokens") or 0)


def _has_text(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or delta.get("content") or delta.get("reasoning_content"))


async def events(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The server-sent events of a stream up to its `[DONE]`."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        yield json.loads(data)
