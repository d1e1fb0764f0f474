"""Bodies of OpenAI's chat and text completions, checked field by field.

What is not implemented is refused where it asks for anything; a field that nobody knows is, too.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.fields import Fields, as_integer, as_list, as_text
from gateway.message_fields import checked_messages
from gateway.request import Options
from gateway.structured_output_fields import requested_output
from gateway.tool_fields import ToolRequest, tool_request
from outrider.serving.errors import InvalidArgument
from outrider.serving.sampling_parameters import MAX_TOP_K, SamplingParameters

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 256
MAX_CHOICES = 128  # of a prompt
MAX_ANSWERS = 1024  # of a request with several prompts
MAX_INTEGER = 2**31 - 1
MAX_SEED = 2**64 - 1

# Fields that change nothing in the answer: who asks, and what the client keeps with it.
_INERT = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention",
)  # fmt: skip
# Fields that are not implemented, with the values that ask for nothing.
_Neutral = tuple[tuple[str, tuple[object, ...], str], ...]
_NEUTRAL_IN_CHAT: _Neutral = (
    ("logprobs", (False,), "false"),
    ("top_logprobs", (0,), "0"),
    ("functions", ([],), "empty"),
    ("function_call", ("none", "auto"), "'none' or 'auto'"),
    ("modalities", (["text"],), "['text']"),
    ("audio", (), "absent"),
    ("prediction", (), "absent"),
    ("reasoning_effort", (), "absent"),
    ("verbosity", (), "absent"),
    ("web_search_options", (), "absent"),
)
_NEUTRAL_IN_TEXT: _Neutral = (
    ("logprobs", (), "absent"),
    ("echo", (False,), "false"),
    ("suffix", ("",), "empty"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How the answers are sent, and how many to each prompt."""

    num_choices: int
    is_streamed: bool
    includes_usage: bool
    includes_token_ids: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatForm:
    """A chat completion as asked for. The role `developer` is the template's business."""

    model: str
    messages: list[Mapping[str, Any]]
    tools: ToolRequest | None
    options: Options
    delivery: Delivery


@dataclass(frozen=True, slots=True, kw_only=True)
class TextForm:
    """A text completion as asked for; each prompt is a text or token ids."""

    model: str
    prompts: list[str | list[int]]
    options: Options
    delivery: Delivery


def chat_form(body: object) -> ChatForm:
    """Raises InvalidArgument naming field, value and bound."""
    fields = Fields(body)
    model = _model(fields)
    messages = checked_messages(fields.take("messages"))
    max_tokens = _max_tokens(fields, "max_tokens")
    max_completion_tokens = _max_tokens(fields, "max_completion_tokens")
    if None not in (max_tokens, max_completion_tokens) and max_tokens != max_completion_tokens:
        raise InvalidArgument("max_completion_tokens", max_completion_tokens,
                              f"equal to max_tokens, {max_tokens}, or absent")  # fmt: skip
    return ChatForm(
        model=model,
        messages=messages,
        tools=tool_request(fields),
        options=_options(fields, max_completion_tokens or max_tokens),
        delivery=_delivery(fields, _num_choices(fields), _NEUTRAL_IN_CHAT),
    )


def text_form(body: object) -> TextForm:
    """Raises InvalidArgument naming field, value and bound."""
    fields = Fields(body)
    model = _model(fields)
    prompts = _prompts(fields.take("prompt"))
    num_choices = _num_choices(fields)
    if len(prompts) * num_choices > MAX_ANSWERS:
        raise InvalidArgument("n", num_choices,
                              f"at most {MAX_ANSWERS // len(prompts)} for each of {len(prompts)} "
                              "prompts")  # fmt: skip
    # The best of as many as are asked for are all of them.
    fields.must_be_neutral("best_of", (num_choices,), f"n, {num_choices}")
    return TextForm(
        model=model,
        prompts=prompts,
        options=_options(fields, _max_tokens(fields, "max_tokens")),
        delivery=_delivery(fields, num_choices, _NEUTRAL_IN_TEXT),
    )


def _model(fields: Fields) -> str:
    model = fields.text("model")
    if model is None:
        raise InvalidArgument("model", None, "the served model's name")
    return model


def _max_tokens(fields: Fields, field: str) -> int | None:
    return fields.integer(field, at_least=1, at_most=MAX_INTEGER)


def _options(fields: Fields, max_tokens: int | None) -> Options:
    temperature = fields.number("temperature")
    top_p = fields.number("top_p")
    min_p = fields.number("min_p")
    repetition_penalty = fields.number("repetition_penalty")
    return Options(
        max_tokens=max_tokens,
        sampling=SamplingParameters(
            temperature=1.0 if temperature is None else temperature,
            top_k=fields.integer("top_k", at_least=0, at_most=MAX_TOP_K) or 0,
            top_p=1.0 if top_p is None else top_p,
            min_p=0.0 if min_p is None else min_p,
            seed=fields.integer("seed", at_least=0, at_most=MAX_SEED),
            presence_penalty=fields.number("presence_penalty") or 0.0,
            frequency_penalty=fields.number("frequency_penalty") or 0.0,
            repetition_penalty=1.0 if repetition_penalty is None else repetition_penalty,
            logit_bias=_logit_bias(fields.take("logit_bias")),
        ),
        stop=_stop(fields.take("stop")),
        stop_token_ids=tuple(
            as_integer(f"stop_token_ids[{index}]", token_id, at_least=0, at_most=MAX_INTEGER)
            for index, token_id in enumerate(
                as_list("stop_token_ids", fields.take("stop_token_ids"), at_most=MAX_STOP_TOKEN_IDS)
            )
        ),
        ignore_eos=fields.boolean("ignore_eos"),
        min_tokens=fields.integer("min_tokens", at_least=0, at_most=MAX_INTEGER) or 0,
        draft_length=_draft_length(fields.take("speculation")),
        structured_output=requested_output(fields),
    )


def _logit_bias(biases: object) -> tuple[tuple[int, float], ...]:
    """OpenAI's map from token ids, as texts, to numbers."""
    if biases is None:
        return ()
    if not isinstance(biases, dict):
        raise InvalidArgument("logit_bias", biases, "an object from token ids to numbers")
    fields = Fields(biases, "logit_bias")
    found = {}
    for key in biases:
        if not (key.isascii() and key.isdecimal() and int(key) <= MAX_INTEGER):
            raise InvalidArgument("logit_bias", key, "token ids")
        bias = fields.number(key)
        if int(key) in found:
            raise InvalidArgument("logit_bias", key, "each token once")
        found[int(key)] = 0.0 if bias is None else bias
    return tuple(sorted(found.items()))


def _draft_length(speculation: object) -> int | None:
    if speculation is None:
        return None
    fields = Fields(speculation, "speculation")
    draft_length = fields.integer("draft_length", at_least=0, at_most=255)
    fields.refuse_unknown()
    return draft_length


def _stop(stop: object) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else as_list("stop", stop, at_most=MAX_STOPS)
    for index, text in enumerate(stops):
        name = "stop" if isinstance(stop, str) else f"stop[{index}]"
        check_stop(name, as_text(name, text))
    return tuple(map(str, stops))


def check_stop(name: str, text: str) -> None:
    """Raises InvalidArgument unless the text can be a stop string."""
    if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
        raise InvalidArgument(name, text, f"1 to {MAX_STOP_CHARACTERS} characters long")


def _num_choices(fields: Fields) -> int:
    return fields.integer("n", at_least=1, at_most=MAX_CHOICES) or 1


def _delivery(fields: Fields, num_choices: int, neutral: _Neutral) -> Delivery:
    """Reads what is left and refuses what is not known; so it comes last."""
    is_streamed = fields.boolean("stream")
    stream_options = fields.take("stream_options")
    includes_usage = False
    if stream_options is not None:
        if not is_streamed:
            raise InvalidArgument("stream_options", stream_options, "absent without stream")
        inner = Fields(stream_options, "stream_options")
        includes_usage = inner.boolean("include_usage")
        inner.must_be_neutral("include_obfuscation", (False,), "false")
        inner.refuse_unknown()
    includes_token_ids = fields.boolean("return_token_ids")
    for field in _INERT:
        fields.take(field)
    for field, values, words in neutral:
        fields.must_be_neutral(field, values, words)
    fields.refuse_unknown()
    return Delivery(
        num_choices=num_choices,
        is_streamed=is_streamed,
        includes_usage=includes_usage,
        includes_token_ids=includes_token_ids,
    )


def _prompts(prompt: object) -> list[str | list[int]]:
    """One text, several, one list of token ids, or several."""
    if isinstance(prompt, str):
        return [as_text("prompt", prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidArgument("prompt", prompt, "a text, token ids, or a list of either")
    if not isinstance(prompt[0], (str, list)):
        return [_token_ids("prompt", prompt)]
    if len(prompt) > MAX_ANSWERS:
        raise InvalidArgument("prompt", f"a list of {len(prompt)}", f"at most {MAX_ANSWERS}")
    prompts: list[str | list[int]] = []
    for index, one in enumerate(prompt):
        name = f"prompt[{index}]"
        if isinstance(prompt[0], str):
            prompts.append(as_text(name, one))
        elif isinstance(one, list):
            prompts.append(_token_ids(name, one))
        else:
            raise InvalidArgument(name, one, "token ids, as those before it")
    return prompts


def _token_ids(name: str, token_ids: list[object]) -> list[int]:
    return [
        as_integer(f"{name}[{index}]", token_id, at_least=0, at_most=MAX_INTEGER)
        for index, token_id in enumerate(token_ids)
    ]
