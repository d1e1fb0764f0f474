"""What REST and gRPC share: a checked request, and its answer while the gateway is ready."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

from gateway.canary import CanaryReport
from gateway.cluster import Cluster
from gateway.generation import Generation, generating
from gateway.model import ServedModel, TextModel
from gateway.request import GenerationRequest, Options
from gateway.stats import Statistics
from gateway.tokens import chat_prompt, check_text, check_token_ids, generation_request, text_prompt
from gateway.tool_calling import ToolCalling, check_tool_calls, tool_calling
from gateway.tool_fields import ToolRequest
from outrider.serving.errors import InvalidArgument
from outrider.serving.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """What boot made: the text side of the model, and the canary that went all the way."""

    text_model: TextModel
    canary: CanaryReport


class UnknownModel(InvalidArgument):
    """The request names a model that is not served here."""


class Generator:
    """Every method raises NotServing unless the gateway is ready, InvalidArgument for bad input."""

    def __init__(
        self, *, lifecycle: Lifecycle[Gateway], cluster: Cluster, statistics: Statistics
    ) -> None:
        self._lifecycle = lifecycle
        self._cluster = cluster
        self._statistics = statistics

    def model(self) -> ServedModel:
        """The served model."""
        return self._cluster.usable_connection().attachment.model

    def check_model(self, name: str) -> None:
        """Raises UnknownModel unless `name` is the served model's."""
        served = self.model().name
        if name != served:
            raise UnknownModel("model", name, repr(served))

    def tool_calling(self, request: ToolRequest, options: Options) -> ToolCalling:
        """How the model is to call functions."""
        return tool_calling(request, self._lifecycle.ready().text_model, options)

    async def chat_request(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Options,
        request_id: str,
        calling: ToolCalling | None = None,
    ) -> GenerationRequest:
        """A conversation; by default up to the end of the context."""
        if calling is None:
            prompt = await self.chat_tokens(messages)
            return await self._request("messages", prompt, options, request_id, None)
        prompt = await self.chat_tokens(messages, calling.shown)
        options = replace(options, structured_output=calling.output)
        request = await self._request("messages", prompt, options, request_id, None)
        return replace(request, shows_special=calling.reads_special)

    async def text_request(
        self, text: str, options: Options, request_id: str, *, default_max_tokens: int | None
    ) -> GenerationRequest:
        """A text to continue."""
        prompt = await self.text_tokens(text)
        return await self._request("prompt", prompt, options, request_id, default_max_tokens)

    async def token_request(
        self,
        field: str,
        token_ids: Sequence[int],
        options: Options,
        request_id: str,
        *,
        default_max_tokens: int | None,
    ) -> GenerationRequest:
        """Token ids to continue, taken as they are."""
        check_token_ids(field, token_ids, self.model().vocab_size)
        return await self._request(field, token_ids, options, request_id, default_max_tokens)

    async def chat_tokens(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The prompt that a conversation becomes."""
        text_model = self._lifecycle.ready().text_model
        check_tool_calls(messages, text_model.tool_support)
        return await chat_prompt(text_model, messages, self.model().max_sequence_length, tools)

    async def text_tokens(self, text: str, *, adds_bos: bool = True) -> list[int]:
        """The prompt that a text becomes."""
        context = self.model().max_sequence_length
        check_text("prompt", text)
        return await text_prompt(
            self._lifecycle.ready().text_model, text, context, adds_bos=adds_bos
        )

    def text_of(self, field: str, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        check_token_ids(field, token_ids, self.model().vocab_size)
        return self._lifecycle.ready().text_model.vocabulary.decode(token_ids, skip_special=False)

    def generate(self, request: GenerationRequest) -> AbstractAsyncContextManager[Generation]:
        """The answer; leaving the block early cancels it. Raises Overloaded, too."""
        return generating(
            request,
            self._cluster.usable_connection().attachment.batcher,
            self._lifecycle.ready().text_model.vocabulary,
            self._statistics,
        )

    async def _request(
        self,
        field: str,
        prompt_token_ids: Sequence[int],
        options: Options,
        request_id: str,
        default_max_tokens: int | None,
    ) -> GenerationRequest:
        request = generation_request(
            self.model(),
            request_id=request_id,
            field=field,
            prompt_token_ids=prompt_token_ids,
            options=options,
            default_max_tokens=default_max_tokens,
        )
        if options.structured_output is not None:
            # The target compiles it again; what cannot be compiled is refused here, by its field.
            compiler = self._lifecycle.ready().text_model.grammar_compiler
            requested = options.structured_output
            await compiler.compiled(requested.field, requested.output)
        return request
