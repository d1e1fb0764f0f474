"""A model's own chat template, rendered in a sandbox: messages become one prompt text.

What clients wrote stays told apart from what the template wrote, so that a message cannot speak
with the model's control tokens.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import jinja2

from gateway.chat_message import template_messages
from gateway.template_environment import template_environment
from outrider.serving.errors import InvalidArgument, ServiceError
from outrider.serving.special_tokens import SpecialTokens
from outrider.serving.tokenizer import Vocabulary

# What running a template on a client's messages can raise besides jinja's own errors.
_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError,
    RecursionError,
)  # fmt: skip
# Private-use characters; the first that no text of a request holds marks its special tokens.
_MARKERS: Final = tuple(map(chr, range(0x10FF00, 0x10FFFE)))


class ChatTemplateMissing(ServiceError):
    """The model has no chat template, so it cannot chat."""

    code = InvalidArgument.code


class ChatTemplateError(ServiceError):
    """The model's template refused the messages or failed on them; the text carries its words."""

    code = InvalidArgument.code


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedChat:
    """A prompt, and the offsets where clients' text only spells a special token.

    Encode with `vocabulary.encode(text, parse_special=True, add_bos=False, protected=protected)`:
    a template writes the beginning-of-sequence token itself where the model wants one.
    """

    text: str
    protected: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A compiled template with the special tokens of its model."""

    template: jinja2.Template
    special: SpecialTokens
    special_tokens: Mapping[str, str]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """The prompt for `messages`; `options` are further variables of the template.

        Raises InvalidArgument for a malformed message and ChatTemplateError where the template
        raises; both carry what a client needs to know.
        """
        given = {**(options or {}), "messages": template_messages(messages), "tools": tools}
        try:
            marker = _unused_marker(json.dumps(given, ensure_ascii=False))
            variables = {
                "documents": None,
                **self.special_tokens,
                **_marked(given, self.special, marker),
                "add_generation_prompt": add_generation_prompt,
            }
            marked = self.template.render(variables)
        except _TEMPLATE_ERRORS as error:
            raise ChatTemplateError(
                f"the model's chat template does not accept these messages: {error}"
            ) from error
        return _unmarked(marked, marker)


def compile_chat_template(vocabulary: Vocabulary) -> ChatTemplate:
    """Compile a model's template.

    Raises ChatTemplateMissing where the model has none, ChatTemplateError where it is malformed.
    """
    if vocabulary.chat_template is None:
        raise ChatTemplateMissing(
            "the model has no chat template, which chat completions need; use /v1/completions, "
            "or a model whose tokenizer_config.json, chat_template.jinja or GGUF metadata has one"
        )
    try:
        template = template_environment().from_string(vocabulary.chat_template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(
            f"the model's chat template is malformed at line {error.lineno}: {error}"
        ) from error
    return ChatTemplate(
        template=template,
        special=vocabulary.special,
        special_tokens=vocabulary.special_tokens,
    )


def _unused_marker(texts: str) -> str:
    for marker in _MARKERS:
        if marker not in texts:
            return marker
    raise ValueError(
        f"they use all {len(_MARKERS)} private-use characters from U+10FF00; one must be left"
    )


def _marked(value: Any, special: SpecialTokens, marker: str) -> Any:
    """The same value with `marker` before each special token that its texts spell."""
    if isinstance(value, str):
        offsets = special.starts(value)
        cuts = [0, *offsets, len(value)]
        return marker.join(value[start:end] for start, end in pairwise(cuts))
    if isinstance(value, Mapping):
        return {
            _marked(key, special, marker): _marked(item, special, marker)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_marked(item, special, marker) for item in value]
    return value


def _unmarked(text: str, marker: str) -> RenderedChat:
    runs = text.split(marker)
    protected: list[int] = []
    offset = 0
    for run in runs[:-1]:
        offset += len(run)
        protected.append(offset)
    return RenderedChat(text="".join(runs), protected=frozenset(protected))
