"""Clients' input to prompt token ids that fit the model's context."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.chat_template import ChatTemplateMissing
from gateway.model import ServedModel, TextModel
from gateway.request import GenerationRequest, Options, draw_seed
from outrider.serving.errors import InvalidArgument

# Longer texts are tokenised beside the event loop.
LONG_TEXT_CHARACTERS = 8192


async def chat_prompt(
    text_model: TextModel,
    messages: Sequence[Mapping[str, Any]],
    context: int,
    tools: Sequence[Mapping[str, Any]] | None = None,
) -> list[int]:
    """The prompt of a conversation, with functions that are shown to the model.

    Raises InvalidArgument and the template's own errors.
    """
    template = text_model.chat_template
    if template is None:
        raise ChatTemplateMissing("the model has no chat template; use completions")

    def encode() -> list[int]:
        rendered = template.render(messages, tools=tools)
        _check_length("messages", rendered.text, text_model, context)
        return text_model.vocabulary.encode(
            rendered.text, parse_special=True, add_bos=False, protected=rendered.protected
        )

    length = sum(len(str(message.get("content"))) for message in messages) + len(str(tools))
    return await _run(encode, length)


async def text_prompt(
    text_model: TextModel, text: str, context: int, *, adds_bos: bool = True
) -> list[int]:
    """The prompt of a plain text: special tokens that it spells are only text. `adds_bos`: with the
    token that begins a text, where the model has one.
    """
    _check_length("prompt", text, text_model, context)

    def encode() -> list[int]:
        return text_model.vocabulary.encode(text, parse_special=False, add_bos=adds_bos)

    return await _run(encode, len(text))


def check_text(field: str, text: str) -> None:
    """Raises InvalidArgument for a text that is no Unicode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, text, "text without lone surrogates") from error


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises InvalidArgument for an id that the model does not have."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidArgument(field, token_id, f"between 0 and {vocab_size - 1}")


def generation_request(
    model: ServedModel,
    *,
    request_id: str,
    field: str,
    prompt_token_ids: Sequence[int],
    options: Options,
    default_max_tokens: int | None,
    priority: int = 0,
) -> GenerationRequest:
    """Puts prompt and options to the model's bounds. Raises InvalidArgument."""
    context = model.max_sequence_length
    if not prompt_token_ids:
        raise InvalidArgument(field, "0 tokens", "at least 1 token")
    if len(prompt_token_ids) > context - 1:
        raise InvalidArgument(
            field,
            f"{len(prompt_token_ids)} tokens",
            f"at most {context - 1}: the context of {context} less one token to generate",
        )
    left = context - len(prompt_token_ids)
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = left if default_max_tokens is None else min(default_max_tokens, left)
    elif not 1 <= max_tokens <= left:
        raise InvalidArgument(
            "max_tokens",
            max_tokens,
            f"between 1 and {left}: what {len(prompt_token_ids)} prompt tokens leave of the "
            f"context of {context}",
        )
    check_token_ids("stop_token_ids", options.stop_token_ids, model.vocab_size)
    if options.draft_length is not None and not 0 <= options.draft_length <= model.max_draft_length:
        raise InvalidArgument(
            "speculation.draft_length",
            options.draft_length,
            f"between 0 and {model.max_draft_length}",
        )
    requested = options.structured_output
    if requested is not None and options.ignore_eos:
        raise InvalidArgument(
            "ignore_eos", True, f"false with {requested.field}: the text ends where it is complete"
        )
    if options.min_tokens:
        _check_min_tokens(options, max_tokens, model.vocab_size)
    asked = options.sampling
    check_token_ids("logit_bias", [token_id for token_id, _ in asked.logit_bias], model.vocab_size)
    seed = draw_seed() if asked.seed is None else asked.seed
    return GenerationRequest(
        request_id=request_id,
        prompt_token_ids=prompt_token_ids,
        max_tokens=max_tokens,
        sampling=replace(asked, seed=seed),
        seed=seed,
        stop=options.stop,
        stop_token_ids=options.stop_token_ids,
        ignore_eos=options.ignore_eos,
        min_tokens=options.min_tokens,
        draft_length=options.draft_length,
        patience_seconds=options.patience_seconds,
        deadline_seconds=options.deadline_seconds,
        priority=priority,
        structured_output=None if requested is None else requested.output,
    )


def _check_min_tokens(options: Options, max_tokens: int, vocab_size: int) -> None:
    if options.min_tokens > max_tokens:
        raise InvalidArgument(
            "min_tokens", options.min_tokens, f"at most the tokens to generate, {max_tokens}"
        )
    requested = options.structured_output
    if requested is not None:
        raise InvalidArgument(
            "min_tokens",
            options.min_tokens,
            f"0 with {requested.field}: the text ends where it is complete",
        )
    if len(set(options.stop_token_ids)) >= vocab_size:
        raise InvalidArgument("min_tokens", options.min_tokens, "0 where every token is a stop")


def _check_length(field: str, text: str, text_model: TextModel, context: int) -> None:
    """Refuses a text that cannot fit, before any time is spent on tokenising it."""
    most = context * text_model.longest_token_bytes
    # A character has at least a byte; a special token is a token like any other.
    if len(text) > most:
        raise InvalidArgument(
            field,
            f"{len(text)} characters",
            f"at most {most}, which is more than a context of {context} tokens holds",
        )


async def _run(encode: Callable[[], list[int]], length: int) -> list[int]:
    if length <= LONG_TEXT_CHARACTERS:
        return encode()
    return await asyncio.to_thread(encode)
