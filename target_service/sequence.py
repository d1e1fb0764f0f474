"""One sequence: its tokens, its place in the KV cache, its identity on the link."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Protocol

from outrider.engine.logit_rules import NEUTRAL, LogitRules, RuledText
from outrider.engine.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash
from outrider.engine.sampling import Sampling
from outrider.engine.token_constraint import TokenConstraint
from outrider.serving.grammar_compiler import Grammar
from outrider.v1 import generation_pb2


class ReportSink(Protocol):
    """Where a sequence's tokens go: one gateway's stream."""

    def report(self, outcomes: "SequenceOf[Outcome]", step: "StepSummary") -> None:
        """What a step did for this stream's sequences. Called on the engine's thread."""

    def reject(self, sequence_id: int, reason: int, message: str) -> None:
        """A sequence that was not admitted. Called on the engine's thread."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Request:
    """What a gateway asked for, checked."""

    sink: ReportSink
    sequence_id: int
    prompt_token_ids: tuple[int, ...]
    resumed_output_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: Sampling
    stop_token_ids: frozenset[int]
    deadline: float | None  # time.monotonic
    priority: int
    draft_length_override: int | None
    # Seconds that a step may wait for its draft while no sequence without patience decodes.
    patience_seconds: float
    rules: LogitRules | None = None  # None: they would change nothing
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one step did for one sequence. `accepted_length` counts emitted tokens that were
    drafted.
    """

    sequence_id: int
    emitted_token_ids: tuple[int, ...]
    drafted_length: int
    accepted_length: int
    finish_reason: int
    # Of the prompt, with the first outcome; 0 in all others.
    cached_prompt_length: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSummary:
    """What one step did for all sequences."""

    step_id: int
    is_speculative: bool
    decode_rows: int
    draft_length: int  # the longest that was asked for
    prefill_tokens: int
    running_sequences: int
    waiting_sequences: int
    forward_seconds: float
    draft_wait_seconds: float
    step_seconds: float


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """A request that runs. Owned by the engine's thread.

    `token_ids` are committed: the prompt and the output so far. The KV cache holds the first
    `cached_length` of them.
    """

    request: Request
    token_ids: list[int]
    arrival: int
    cached_length: int = 0
    block_table: list[int] = field(default_factory=list)
    # Of its first full blocks, as far as they were asked for.
    block_names: list[bytes] = field(default_factory=list)
    # So many of its blocks have their name in the pool, or came from there.
    num_named: int = 0
    # Prompt tokens that were in the cache when it first ran; None before.
    cached_prompt_length: int | None = None
    prefix_hash: int = EMPTY_PREFIX_HASH
    # Follows the output, also through a preemption: it knows tokens, not blocks.
    constraint: TokenConstraint | None = None

    @classmethod
    def admit(cls, request: Request, arrival: int) -> "Sequence":
        """A sequence with nothing computed yet."""
        token_ids = [*request.prompt_token_ids, *request.resumed_output_token_ids]
        return cls(
            request=request,
            token_ids=token_ids,
            arrival=arrival,
            prefix_hash=extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids),
            constraint=None if request.grammar is None else request.grammar.start(),
        )

    @property
    def committed_length(self) -> int:
        """Tokens that are final."""
        return len(self.token_ids)

    @property
    def output_length(self) -> int:
        """Tokens of the output so far."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """The output so far, the resumed tokens included."""
        return self.token_ids[len(self.request.prompt_token_ids) :]

    @property
    def is_decoding(self) -> bool:
        """Only its last token is not in the cache: its next row yields a token."""
        return self.cached_length == len(self.token_ids) - 1

    @property
    def has_rules(self) -> bool:
        """Its tokens depend on those before them otherwise than through the model."""
        rules = self.request.rules
        if rules is not None and rules.change(self.output_length):
            return True
        return self.constraint is not None

    @property
    def ruled(self) -> RuledText | None:
        """What the rules of its request look at now; None without rules."""
        if not self.has_rules:
            return None
        return RuledText(
            rules=self.request.rules or NEUTRAL,
            prompt=self.request.prompt_token_ids,
            output=self.output_token_ids,
            constraint=self.constraint,
        )

    @property
    def forced_token_ids(self) -> SequenceOf[int]:
        """What its grammar leaves no choice about next; empty where there is one."""
        if self.constraint is None:
            return ()
        return self.constraint.forced(self.output_token_ids)

    @property
    def has_emitted(self) -> bool:
        """It has had a token since it was admitted."""
        request = self.request
        given = len(request.prompt_token_ids) + len(request.resumed_output_token_ids)
        return len(self.token_ids) > given

    @property
    def max_length(self) -> int:
        """Tokens at which it ends."""
        return len(self.request.prompt_token_ids) + self.request.max_tokens

    @property
    def room(self) -> int:
        """Tokens that it may still emit; at least 1 while it runs."""
        return self.max_length - self.committed_length

    def commit(self, token_ids: SequenceOf[int]) -> tuple[tuple[int, ...], int]:
        """Appends tokens one by one up to a stop token or the length; returns those taken and the
        finish reason.
        """
        taken: list[int] = []
        finish_reason = 0
        for token_id in token_ids:
            taken.append(token_id)
            if token_id in self.request.stop_token_ids:
                finish_reason = generation_pb2.FINISH_REASON_STOP
            elif self.committed_length + len(taken) >= self.max_length:
                finish_reason = generation_pb2.FINISH_REASON_LENGTH
            if finish_reason:
                break
        self.token_ids.extend(taken)
        self.prefix_hash = extend_prefix_hash(self.prefix_hash, taken)
        return tuple(taken), finish_reason
