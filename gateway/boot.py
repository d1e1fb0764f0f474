"""The first two stages of the gateway's start-up: configuration and tokenizer."""

from gateway.chat_template import ChatTemplate, ChatTemplateMissing, compile_chat_template
from gateway.config import GatewayConfig
from gateway.model import TextModel
from gateway.tool_format import tool_support
from outrider.serving.errors import ConfigurationError
from outrider.serving.grammar_compiler import make_grammar_compiler
from outrider.serving.model_source import resolve_model
from outrider.serving.tokenizer import load_tokenizer


def check_config(config: GatewayConfig) -> None:
    """What single fields cannot say. Raises ConfigurationError."""
    if not config.target_address:
        raise ConfigurationError("target-address is empty, must be host:port of the target service")
    if config.require_draft and not config.draft_address:
        raise ConfigurationError("require-draft needs draft-address, which is empty")


def load_text_model(reference: str) -> TextModel:
    """The tokenizer and the chat template of a model; a model without a template cannot chat."""
    source = resolve_model(reference)
    vocabulary = load_tokenizer(source.path)
    try:
        chat_template: ChatTemplate | None = compile_chat_template(vocabulary)
    except ChatTemplateMissing:
        chat_template = None
    return TextModel(
        name=source.name,
        vocabulary=vocabulary,
        chat_template=chat_template,
        longest_token_bytes=max(map(len, vocabulary.token_bytes.by_id)),
        tool_support=tool_support(chat_template, vocabulary.chat_template or ""),
        grammar_compiler=make_grammar_compiler(vocabulary),
    )
