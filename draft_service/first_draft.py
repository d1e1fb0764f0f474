"""The first real work of a draft service: a proposal through the path that requests take.

Messages go through the same Proposer class, codec and drafter as a link's; what comes back is
the evidence without which nothing is served.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from draft_service.counters import Counters
from draft_service.drafters.drafter import Drafter, FeatureNeeds, State
from draft_service.link_sessions import LinkTerms
from draft_service.proposer import Proposer
from outrider.engine.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash
from outrider.serving.columns import pack, unpack
from outrider.serving.link_protocol import (
    BASE_LENGTH,
    COMMIT_COUNT,
    DRAFT_LENGTH,
    FEATURE_COUNT,
    FEATURE_FIRST_POSITION,
    GENERATION,
    PREFIX_HASH,
    SLOT,
    TOKEN_ID,
)
from outrider.v1 import draft_pb2, sampling_pb2

DRAFT_LENGTH_ASKED = 4


class FirstDraftError(RuntimeError):
    """The first proposal did not come back as it must."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDraft:
    """Evidence: what was asked and what was proposed."""

    prompt_token_ids: tuple[int, ...]
    draft_token_ids: tuple[int, ...]
    seconds: float

    def words(self) -> str:
        """One line."""
        return (
            f"proposed {list(self.draft_token_ids)} behind {len(self.prompt_token_ids)} tokens "
            f"in {self.seconds * 1e3:.2f} ms"
        )


def first_draft(drafter: Drafter[State], *, vocab_size: int) -> FirstDraft:
    """Opens a repetitive sequence, commits one token more, and asks for a draft. Where features
    are needed they come as from a target: the prompt's ahead, the last with the commit.

    Raises FirstDraftError if no draft, or one out of the vocabulary, comes back, or if something
    of the sequence is kept.
    """
    period = [token_id % vocab_size for token_id in (5, 6, 7, 8)]
    prompt = period * 4
    terms = LinkTerms(
        target_boot_id=1,
        stream_epoch=1,
        vocab_size=vocab_size,
        max_draft_length=DRAFT_LENGTH_ASKED,
        max_sequences=1,
    )
    proposer = Proposer(
        drafter=drafter,
        draft_boot_id=1,
        max_sequences=1,
        activity=_no_activity,
        counters=Counters(),
    )
    started = time.monotonic()
    proposer.attach(terms)
    proposer.receive(terms, _opening(prompt), started)
    needs = drafter.offer.feature_needs
    num_ahead = len(prompt) - len(period)
    if needs is not None:
        features = _features(needs, 0, num_ahead)
        proposer.receive(terms, _step(prompt, step_id=1, features=features), started)
    while proposer.has_unprepared:
        proposer.prepare()
    prompt = [*prompt, period[0]]
    step = _step(
        prompt,
        step_id=2,
        commit_count=1,
        draft_length=DRAFT_LENGTH_ASKED,
        features=None if needs is None else _features(needs, num_ahead, len(period)),
    )
    proposer.receive(terms, step, started)
    proposer.propose()
    seconds = time.monotonic() - started
    draft = _draft_in([response for _, response in proposer.take_answers()], vocab_size)
    proposer.detach(terms)
    if proposer.session_count:
        raise FirstDraftError(f"{proposer.session_count} sequences are kept of a closed link")
    return FirstDraft(prompt_token_ids=tuple(prompt), draft_token_ids=tuple(draft), seconds=seconds)


def _no_activity(name: str) -> AbstractContextManager[None]:
    return nullcontext()


def _opening(token_ids: list[int]) -> draft_pb2.LinkRequest:
    return draft_pb2.LinkRequest(
        open=draft_pb2.OpenBatch(
            target_boot_id=1,
            stream_epoch=1,
            sequences=[
                draft_pb2.Open(
                    slot=0,
                    generation=1,
                    token_ids=pack(token_ids, TOKEN_ID),
                    prefix_hash=extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids),
                    sampling=sampling_pb2.SamplingParameters(temperature=0.0, seed=0),
                )
            ],
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Features:
    """Random projected rows, of the scale of a normalised hidden state."""

    first_position: int
    count: int
    rows: bytes


def _features(needs: FeatureNeeds, first_position: int, count: int) -> _Features:
    numbers = np.random.default_rng(first_position).standard_normal(
        (count, needs.width), np.float32
    )
    # numpy has no bfloat16: its bits are the upper half of a float32's.
    upper_halves = (numbers.view("<u4") >> np.uint32(16)).astype("<u2")
    is_half = needs.dtype == "float16"
    rows = numbers.astype("<f2").tobytes() if is_half else upper_halves.tobytes()
    return _Features(first_position=first_position, count=count, rows=rows)


def _step(
    token_ids: Sequence[int],
    *,
    step_id: int,
    commit_count: int = 0,
    draft_length: int = 0,
    features: _Features | None = None,
) -> draft_pb2.LinkRequest:
    step = draft_pb2.Step(
        target_boot_id=1,
        stream_epoch=1,
        step_id=step_id,
        slots=pack([0], SLOT),
        generations=pack([1], GENERATION),
        base_lengths=pack([len(token_ids)], BASE_LENGTH),
        prefix_hashes=pack([extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids)], PREFIX_HASH),
        commit_counts=pack([commit_count], COMMIT_COUNT),
        commit_token_ids=pack(token_ids[len(token_ids) - commit_count :], TOKEN_ID),
        draft_lengths=pack([draft_length], DRAFT_LENGTH),
    )
    if features is not None:
        step.feature_first_positions = pack([features.first_position], FEATURE_FIRST_POSITION)
        step.feature_counts = pack([features.count], FEATURE_COUNT)
        step.inline_features = features.rows
    return draft_pb2.LinkRequest(step=step)


def _draft_in(responses: list[draft_pb2.LinkResponse], vocab_size: int) -> list[int]:
    kinds = [response.WhichOneof("kind") for response in responses]
    if kinds != ["draft"]:
        raise FirstDraftError(f"the first proposal came back as {kinds}, must be one draft")
    token_ids = unpack("token_ids", responses[0].draft.token_ids, TOKEN_ID)
    if not token_ids or min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise FirstDraftError(
            f"the first proposal is {token_ids}, must be tokens below {vocab_size}"
        )
    return token_ids
