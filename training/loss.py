"""Training-time test: the head drafts from every position at once, and every step is scored.

Step 0 runs over the target's features. Step j of chain i stands at rotary position i + j, reads
token x_{i+j+1} and, as its feature, the head's own output of step j - 1 of the same chain; it looks
at the true rows 0..i and at its chain's rows of steps 1..j. It predicts x_{i+j+2}, for which the
target's logits are those of position i + j + 1. A draft that starts at chain i does just this as
long as its tokens are right, so the same pass also says how many of them would be accepted.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from training.batches import Batch
from training.chain_attention import ChainAttention
from training.draft_loss import StepTargets, step_loss
from training.head import CastHead, Rotation
from training.row_divergence import RowDivergence

# Keeps the normalisation of a step that no chain reaches finite; weights sum to far more.
_TINY = 1e-9


@dataclass(frozen=True, slots=True)
class Kernels:
    """The two costly parts, in the form that suits the device."""

    attention: ChainAttention
    row_divergence: RowDivergence
    max_logits_rows: int


@dataclass(frozen=True, slots=True)
class TargetRows:
    """What the frozen target gives for a batch."""

    features: torch.Tensor  # [batch, length, layers * hidden_size]
    final_hidden: torch.Tensor  # [batch, length, hidden_size], after the final norm


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The target's tensors that the loss needs, on the device and in its dtype."""

    embedding: torch.Tensor  # [vocab_size, hidden_size]
    draft_rows: torch.Tensor  # [draft_vocab, hidden_size] of the target's output head
    draft_index: torch.Tensor  # [vocab_size] int64: index in the draft vocabulary, -1 outside


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One drafting step of all chains of a batch; [chains] tensors without gradient."""

    loss: torch.Tensor  # weighted mean divergence of the step
    is_valid: torch.Tensor  # 1.0 where the chain still has a token to predict
    is_correct: torch.Tensor  # 1.0 where the most probable draft token is the true one


def unrolled_steps(
    head: CastHead,
    batch: Batch,
    target: TargetRows,
    vocabulary: Vocabulary,
    rotation: Rotation,
    kernels: Kernels,
    step_count: int,
) -> Iterator[StepOutcome]:
    """The outcome of steps 0 .. step_count - 1, each computed when it is asked for.

    A step's rows are weighted by the head's own probability of the tokens before them in the chain:
    a draft gets there only if those were right. Tokens outside the draft vocabulary cannot be
    drafted, and have no weight. `rotation` covers positions 0 .. length + step_count - 2.
    """
    length = batch.tokens.shape[1]
    tokens = F.pad(batch.tokens, (0, step_count + 1))
    draft_ids = vocabulary.draft_index[tokens].flatten()
    chain_tokens = batch.chains + batch.chains // length * (step_count + 1)
    target_logits = _target_logits(batch, target, vocabulary)
    embedding_part = head.embedding_part(F.embedding(tokens[:, 1:], vocabulary.embedding))

    feature = head.project(target.features)
    reached = torch.ones(
        len(batch.chains), device=feature.device, dtype=_wide(feature.dtype)
    )  # probability of having drafted all before
    key0 = value0 = feature
    own_keys: list[torch.Tensor] = []
    own_values: list[torch.Tensor] = []
    groups = head.shape.num_heads // head.shape.num_kv_heads
    for step in range(step_count):
        query, key, value = head.attention_inputs(
            feature, embedding_part[:, step : step + length], rotation.span(step, length)
        )
        if step == 0:
            key0, value0 = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        else:
            own_keys.append(key)
            own_values.append(value)
        attended = kernels.attention(query, key0, value0, own_keys, own_values)
        feature = head.finish(feature, attended)

        true_ids = draft_ids[chain_tokens + step + 2]
        is_valid = (batch.chain_lengths > step).to(reached.dtype)
        weights = reached * is_valid * (true_ids >= 0)
        weights = weights / weights.sum().clamp(min=_TINY)
        loss, results = step_loss(
            head.normed_output(feature.flatten(0, 1).index_select(0, batch.chains)),
            head.lm_head,
            StepTargets(target_logits, step, weights, true_ids),
            kernels.row_divergence,
            kernels.max_logits_rows,
        )
        reached = reached * results.true_probability
        yield StepOutcome(loss, is_valid, results.is_correct * is_valid)


@torch.no_grad()
def _target_logits(batch: Batch, target: TargetRows, vocabulary: Vocabulary) -> torch.Tensor:
    """[chains, draft_vocab]: chain i predicts x_{i+2}, whose logits are those of position i + 1.

    Chains of a row are neighbours, so those of step j are j rows further on.
    """
    rows = target.final_hidden.flatten(0, 1).index_select(0, batch.chains + 1)
    return rows @ vocabulary.draft_rows.T


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
