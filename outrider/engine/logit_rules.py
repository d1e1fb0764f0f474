"""Penalties, biases, least lengths and grammars: what a request changes in its logits before
temperature and truncation.

In this order: the repetition penalty (arXiv 1909.05858, equation in section 4.1, with Hugging
Face's sign rule) over all tokens before, the presence and frequency penalties over the output
alone, the biases, as OpenAI defines them, and last -inf for what ends an output that is still too
short, and for what a grammar forbids. A position's
rules see exactly the tokens accepted before it, so a draft changes none of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from outrider.engine.token_constraint import TokenConstraint


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitRules:
    """One request's. Ranges are checked where requests come in."""

    presence_penalty: float = 0.0  # off every token of the output
    frequency_penalty: float = 0.0  # off it as often as it came
    repetition_penalty: float = 1.0  # divides positive logits of tokens before, multiplies others
    logit_bias: tuple[tuple[int, float], ...] = ()  # token id, what is added
    min_tokens: int = 0  # tokens of the output before which
    ending_token_ids: tuple[int, ...] = ()  # these cannot be drawn

    @property
    def are_neutral(self) -> bool:
        """They change nothing."""
        return not self.change(0)

    def change(self, output_length: int) -> bool:
        """Whether they may change logits behind an output of so many tokens, or a longer one."""
        return output_length < self.min_tokens or bool(
            self.presence_penalty
            or self.frequency_penalty
            or self.repetition_penalty != 1
            or self.logit_bias
        )

    def apply(
        self, logits: npt.NDArray[np.float32], prompt: Sequence[int], output: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """The changed logits [vocab] behind `prompt` and `output`, as a copy."""
        changed = logits.copy()
        if self.are_neutral:
            return changed
        counts = np.bincount(np.asarray(output, dtype=np.int64), minlength=len(logits))
        in_output = np.flatnonzero(counts)
        if self.repetition_penalty != 1:
            before = np.union1d(in_output, np.asarray(prompt, dtype=np.int64))
            seen = changed[before]
            penalty = np.float32(self.repetition_penalty)
            changed[before] = np.where(seen > 0, seen / penalty, seen * penalty)
        changed[in_output] -= np.float32(self.presence_penalty)
        changed[in_output] -= np.float32(self.frequency_penalty) * counts[in_output].astype(
            np.float32
        )
        for token_id, bias in self.logit_bias:
            changed[token_id] += np.float32(bias)
        if len(output) < self.min_tokens:
            changed[list(self.ending_token_ids)] = -np.inf
        return changed


NEUTRAL = LogitRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class RuledText:
    """Rules and a grammar, if there is one, with the committed tokens that they look at."""

    rules: LogitRules
    prompt: Sequence[int]
    output: Sequence[int]
    constraint: TokenConstraint | None = None

    def apply(
        self, logits: npt.NDArray[np.float32], drafts: Sequence[int]
    ) -> npt.NDArray[np.float32]:
        """The changed logits [vocab] behind the committed tokens and `drafts`, as a copy."""
        output = [*self.output, *drafts]
        changed = self.rules.apply(logits, self.prompt, output)
        if self.constraint is not None:
            changed[~self.constraint.allowed(output)] = -np.inf
        return changed
