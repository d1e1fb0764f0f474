"""The model as the gateway serves it: tokenizer, chat template, and what the target says of it."""

from dataclasses import dataclass

from gateway.chat_template import ChatTemplate
from gateway.tool_format import ToolSupport
from outrider.serving.grammar_compiler import GrammarCompiler
from outrider.serving.tokenizer import Vocabulary
from outrider.v1 import target_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class TextModel:
    """Text to prompts and back. `chat_template` is None for a model that cannot chat.

    `longest_token_bytes` bounds from below how many tokens a text has, without tokenising it.
    """

    name: str
    vocabulary: Vocabulary
    chat_template: ChatTemplate | None
    longest_token_bytes: int
    grammar_compiler: GrammarCompiler
    tool_support: ToolSupport


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A target's model that has been found to be the gateway's own."""

    name: str
    vocab_size: int
    max_sequence_length: int
    max_running_sequences: int
    max_draft_length: int
    fingerprint: str
    info: target_pb2.ModelInfo

    @property
    def system_fingerprint(self) -> str:
        """What responses carry: enough of the fingerprint to tell models apart."""
        return f"fp_{self.fingerprint[:12]}"


class ModelMismatch(ValueError):
    """The target serves something else than the gateway's own tokenizer belongs to."""


def served_model(info: target_pb2.ModelInfo, own: TextModel) -> ServedModel:
    """Compares the target's model with the gateway's own. Raises ModelMismatch by field."""
    vocabulary = own.vocabulary
    compared = (
        ("name", info.name, own.name),
        ("identity.vocab_size", info.identity.vocab_size, vocabulary.vocab_size),
        ("identity.tokenizer_sha256", info.identity.tokenizer_sha256, vocabulary.sha256),
        (
            "identity.eos_token_ids",
            sorted(info.identity.eos_token_ids),
            sorted(vocabulary.eos_token_ids),
        ),
    )
    for field, theirs, ours in compared:
        if theirs != ours:
            raise ModelMismatch(
                f"{field} is {theirs!r} at the target, {ours!r} at the gateway; "
                "start both with the same --model"
            )
    if info.identity.max_sequence_length < 2:
        raise ModelMismatch(
            f"identity.max_sequence_length is {info.identity.max_sequence_length} at the target, "
            "must be at least 2"
        )
    return ServedModel(
        name=info.name,
        vocab_size=info.identity.vocab_size,
        max_sequence_length=info.identity.max_sequence_length,
        max_running_sequences=info.max_running_sequences,
        max_draft_length=info.max_draft_length,
        fingerprint=info.identity.fingerprint,
        info=info,
    )
