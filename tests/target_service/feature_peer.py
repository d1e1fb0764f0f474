"""The draft's side of a link without a stream: takes messages, keeps tokens and features, answers
with the oracle's own tokens. Everything that it is told is checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from fake_draft_service import column
from fake_engine import HIDDEN_SIZE, features_of, oracle

from outrider.engine.feature_projection import (
    FeatureProjection,
    load_projection,
    serialise_projection,
)
from outrider.engine.sampling import Sampling
from outrider.serving.shared_ring import SharedRing
from outrider.v1 import draft_pb2
from target_service.link_mailbox import LinkMailbox

LAYERS = (2, 5)
WIDTH = 6
ROW_BYTES = 2 * WIDTH


def projection_bytes(seed: int = 0, width: int = WIDTH) -> bytes:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(width, len(LAYERS) * HIDDEN_SIZE, generator=generator)
    return serialise_projection(
        {"fc.weight": weight}, layer_ids=LAYERS, row_dtype=torch.bfloat16, rms_norm_eps=1e-5
    )


def projection(seed: int = 0) -> FeatureProjection:
    return load_projection(projection_bytes(seed), hidden_size=HIDDEN_SIZE, dtype=torch.float32)


@dataclass
class Held:
    """One sequence as the draft's side knows it."""

    tokens: list[int]
    sampling: Sampling
    first_position: int = 0
    features: list[np.ndarray] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.first_position + len(self.features)


@dataclass
class SentRow:
    """What one row of a Step carried."""

    base_length: int
    commit_count: int
    feature_count: int
    draft_length: int


@dataclass
class FeaturePeer:
    """`send` stands in for DraftLink.send."""

    mailbox: LinkMailbox
    projection: FeatureProjection = field(default_factory=projection)
    reader: SharedRing | None = None
    boot_id: int = 7
    # Feature rows are checked against the fake model's, and that they are there.
    is_checking: bool = True
    # A step that was launched before the stream was there gave none: the first ask has none either.
    asks_before_features: int = 0
    # The next Step is answered with a Resync of all its rows.
    forgets: bool = False
    held: dict[tuple[int, int], Held] = field(default_factory=dict)
    steps: list[list[SentRow]] = field(default_factory=list)
    messages: list[draft_pb2.Step] = field(default_factory=list)
    num_opens: int = 0

    def send(self, stream_epoch: int, messages: Sequence[draft_pb2.LinkRequest]) -> None:
        for message in messages:
            kind = message.WhichOneof("kind")
            if kind == "open":
                for row in message.open.sequences:
                    self.num_opens += 1
                    sampling = row.sampling
                    self.held[row.slot, row.generation] = Held(
                        tokens=column(row.token_ids, "<i4"),
                        sampling=Sampling(temperature=sampling.temperature, seed=sampling.seed),
                    )
            elif kind == "close":
                rows = zip(column(message.close.slots, "<u4"),
                           column(message.close.generations, "<u4"), strict=True)  # fmt: skip
                for key in rows:
                    del self.held[key]
            else:
                self._step(message.step)

    def _step(self, step: draft_pb2.Step) -> None:
        self.messages.append(step)
        keys = list(zip(column(step.slots, "<u4"), column(step.generations, "<u4"), strict=True))
        base_lengths = column(step.base_lengths, "<u4")
        commit_counts = column(step.commit_counts, "<u4")
        tokens = column(step.commit_token_ids, "<i4")
        draft_lengths = column(step.draft_lengths, "<u1")
        counts = column(step.feature_counts, "<u4") or [0] * len(keys)
        positions = column(step.feature_first_positions, "<u4") or [0] * len(keys)
        offsets = column(step.shared_memory_offsets, "<u8") or None
        assert len(set(keys)) == len(keys)
        if self.forgets and any(draft_lengths):
            self.forgets = False
            for key in keys:
                del self.held[key]
            self.mailbox.deliver(
                draft_pb2.LinkResponse(
                    resync=draft_pb2.Resync(
                        target_boot_id=step.target_boot_id, stream_epoch=step.stream_epoch,
                        slots=step.slots, generations=step.generations,
                        held_lengths=bytes(4 * len(keys)),
                    )
                )
            )  # fmt: skip
            self._answer(step, [[] for _ in keys])
            return
        inline = step.inline_features
        drafts: list[list[int]] = []
        sent = []
        for index, key in enumerate(keys):
            held = self.held[key]
            held.tokens += tokens[: commit_counts[index]]
            tokens = tokens[commit_counts[index] :]
            assert len(held.tokens) == base_lengths[index]
            size = counts[index] * ROW_BYTES
            if offsets is None:
                content, inline = inline[:size], inline[size:]
            elif size:
                assert self.reader is not None
                content = self.reader.read(offsets[index], size) or b""
            else:
                content = b""
            assert len(content) == size
            if size:
                self._add_features(held, positions[index], content)
            if draft_lengths[index] and self.is_checking:
                # Only a sequence with all its features is asked for.
                if held.features or not self.asks_before_features:
                    assert held.end == len(held.tokens) - 1
                else:
                    self.asks_before_features -= 1
            drafts.append(oracle(held.tokens, held.sampling, draft_lengths[index]))
            sent.append(
                SentRow(base_lengths[index], commit_counts[index], counts[index],
                        draft_lengths[index])
            )  # fmt: skip
        assert not tokens and not inline
        self.steps.append(sent)
        if any(draft_lengths):
            self._answer(step, drafts)

    def _add_features(self, held: Held, first_position: int, content: bytes) -> None:
        if not held.features:
            held.first_position = first_position
        assert first_position == held.end, "a gap, or rows that were sent twice"
        rows = np.frombuffer(content, "<u2").reshape(-1, WIDTH)
        assert first_position + len(rows) < len(held.tokens)
        held.features.extend(rows)
        if self.is_checking:
            wanted = features_of(held.tokens[: held.end], self.projection, first_position)
            assert np.array_equal(rows, wanted)

    def _answer(self, step: draft_pb2.Step, drafts: list[list[int]]) -> None:
        self.mailbox.deliver(
            draft_pb2.LinkResponse(
                draft=draft_pb2.Draft(
                    draft_boot_id=self.boot_id,
                    target_boot_id=step.target_boot_id,
                    stream_epoch=step.stream_epoch,
                    step_id=step.step_id,
                    slots=step.slots,
                    generations=step.generations,
                    base_lengths=step.base_lengths,
                    prefix_hashes=step.prefix_hashes,
                    token_counts=bytes(len(tokens) for tokens in drafts),
                    token_ids=b"".join(np.array(tokens, "<i4").tobytes() for tokens in drafts),
                )
            )
        )
