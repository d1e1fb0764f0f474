"""A model whose logits are a hash of the whole prefix, read back through the block table.

Whatever the step loop gets wrong about positions, blocks or rollback changes its tokens.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from outrider.engine.acceptance import Verdict
from outrider.engine.cpu_steps import CpuStep
from outrider.engine.feature_projection import FeatureProjection
from outrider.engine.feature_store import FeatureStore
from outrider.engine.feature_tap import FeatureTap, Tap
from outrider.engine.kv_cache import BlockPool
from outrider.engine.logit_rules import LogitRules
from outrider.engine.runner import SequenceRows
from outrider.engine.sampling import Sampling, sample
from outrider.engine.verify_step import NextRow, RunningStep, SequenceStep
from outrider.serving.grammar_compiler import Grammar

VOCAB_SIZE = 24
HIDDEN_SIZE = 4


def logits_of(prefix: Sequence[int]) -> np.ndarray:
    """float32 [vocab]: next-token logits behind a prefix."""
    return _logits_of(tuple(prefix)).copy()


@lru_cache(maxsize=2**16)
def _logits_of(prefix: tuple[int, ...]) -> np.ndarray:
    digest = hashlib.blake2b(np.asarray(prefix, dtype="<i4").tobytes(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(digest, "little"))
    return generator.normal(scale=2.0, size=VOCAB_SIZE).astype(np.float32)


def oracle(
    prompt: Sequence[int],
    sampling: Sampling,
    max_tokens: int,
    stops: frozenset[int] = frozenset(),
    rules: LogitRules | None = None,
    grammar: Grammar | None = None,
) -> list[int]:
    """The output that any schedule must give."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        logits = logits_of(tokens)
        if rules is not None:
            logits = rules.apply(logits, prompt, tokens[len(prompt) :])
        if grammar is not None:
            allowed = grammar.start().allowed(tokens[len(prompt) :])
            logits = np.where(allowed, logits, np.float32(-np.inf))
        tokens.append(sample(logits, sampling, len(tokens)))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


def hidden_state_of(prefix: Sequence[int], layer: int) -> torch.Tensor:
    """float32 [HIDDEN_SIZE]: what enters a layer at the last token of a prefix."""
    return _hidden_state_of(tuple(prefix), layer).clone()


@lru_cache(maxsize=2**16)
def _hidden_state_of(prefix: tuple[int, ...], layer: int) -> torch.Tensor:
    digest = hashlib.blake2b(np.asarray([layer, *prefix], dtype="<i4").tobytes(), digest_size=8)
    generator = np.random.default_rng(int.from_bytes(digest.digest(), "little"))
    return torch.from_numpy(generator.normal(size=HIDDEN_SIZE).astype(np.float32))


def features_of(tokens: Sequence[int], projection: FeatureProjection, first: int) -> np.ndarray:
    """uint16 [tokens - first, width]: the features of the positions from `first` on."""
    captured = torch.stack(
        [
            torch.cat([hidden_state_of(tokens[: at + 1], layer) for layer in projection.layer_ids])
            for at in range(first, len(tokens))
        ]
    )
    return projection.project(captured).view(torch.int16).numpy().view(np.uint16)


class FakeSteps:
    """Stands in for a StepEngine: the CPU's drawing over a FakeRunner's logits."""

    def __init__(self, runner: "FakeRunner", *, runs_beside_host: bool = False) -> None:
        self.runner = runner
        self.runs_beside_host = runs_beside_host

    def launch(self, sequences: Sequence[SequenceStep], tap: Tap | None) -> CpuStep:
        assert tap is None or isinstance(tap, FeatureTap)
        logits = self.runner.forward([sequence.rows for sequence in sequences], tap)
        return CpuStep(sequences=sequences, logits=logits)

    def make_tap(self, data: bytes) -> Tap:
        raise NotImplementedError("the tests make taps themselves")


class LateSteps:
    """A StepEngine and AheadEngine whose steps run when their verdicts are taken, in the order in
    which they were launched: before that, nothing of them is known.
    """

    runs_beside_host = True

    def __init__(self, runner: "FakeRunner") -> None:
        self._runner = runner
        self.running: list[LateStep] = []
        self.rows_ahead: list[int] = []

    @property
    def blocks_in_use(self) -> set[int]:
        """Of all steps that still have to run."""
        return {
            block
            for step in self.running
            for sequence in step.sequences
            for block in sequence.rows.block_table
        }

    def launch(self, sequences: Sequence[SequenceStep], tap: Tap | None) -> "LateStep":
        assert not self.running
        return self._launch(sequences, tap, {})

    def launch_next(
        self, rows: Sequence[NextRow], tap: Tap | None, *, after: RunningStep
    ) -> "LateStep":
        assert isinstance(after, LateStep) and self.running == [after]
        assert rows and len({row.index for row in rows}) == len(rows)
        for row in rows:
            before = after.sequences[row.index]
            assert before.draft_length == 0 and before.sampling == row.sampling
            assert row.start == before.rows.start + len(before.rows.token_ids)
            assert row.base_length == before.base_length + 1
        self.rows_ahead.append(len(rows))
        sequences = [
            SequenceStep(
                rows=SequenceRows(
                    token_ids=(VOCAB_SIZE,),  # none of the model's, until it is drawn
                    start=row.start,
                    block_table=row.block_table,
                    num_logits=1,
                ),
                draft_length=0,
                sampling=row.sampling,
                base_length=row.base_length,
            )
            for row in rows
        ]
        return self._launch(sequences, tap, {at: row.index for at, row in enumerate(rows)})

    def make_tap(self, data: bytes) -> Tap:
        raise NotImplementedError("the tests make taps themselves")

    def run(self, step: "LateStep", tap: Tap | None) -> list[Verdict]:
        assert self.running[0] is step
        assert tap is None or isinstance(tap, FeatureTap)
        logits = self._runner.forward([sequence.rows for sequence in step.sequences], tap)
        verdicts = CpuStep(sequences=step.sequences, logits=logits).verdicts()
        del self.running[0]
        of_draws = iter(verdicts)
        drawn = [
            None if sequence.sampling is None else next(of_draws).bonus_token_id
            for sequence in step.sequences
        ]
        for behind in self.running:
            behind.resolve(drawn)
        return verdicts

    def _launch(
        self, sequences: Sequence[SequenceStep], tap: Tap | None, sources: dict[int, int]
    ) -> "LateStep":
        # As they are now: what becomes of a block table later must not reach a step that runs.
        copies = [
            replace(
                sequence,
                rows=replace(
                    sequence.rows,
                    token_ids=tuple(sequence.rows.token_ids),
                    block_table=tuple(sequence.rows.block_table),
                ),
            )
            for sequence in sequences
        ]
        step = LateStep(self, copies, tap, sources)
        self.running.append(step)
        return step


class LateStep:
    """A RunningStep of LateSteps."""

    def __init__(
        self,
        engine: LateSteps,
        sequences: list[SequenceStep],
        tap: Tap | None,
        sources: dict[int, int],
    ) -> None:
        """`sources`: by place, that of the sequence in the step before whose token it takes."""
        self._engine = engine
        self._tap = tap
        self._sources = sources
        self.sequences = sequences

    def resolve(self, drawn: Sequence[int | None]) -> None:
        """Takes what the step before drew, by place."""
        for place, source in self._sources.items():
            token_id = drawn[source]
            assert token_id is not None
            sequence = self.sequences[place]
            rows = replace(sequence.rows, token_ids=(token_id,))
            self.sequences[place] = replace(sequence, rows=rows)

    def verdicts(self) -> list[Verdict]:
        return self._engine.run(self, self._tap)


class WatchedPool(BlockPool):
    """The last holder of a block must not leave while a step that uses it has still to run."""

    def __init__(self, num_blocks: int, blocks_in_use: Callable[[], set[int]]) -> None:
        super().__init__(num_blocks)
        self._blocks_in_use = blocks_in_use

    def release(self, blocks: Sequence[int]) -> None:
        super().release(blocks)
        unheld = {block for block in blocks if not self._num_holders[block]}
        assert not self._blocks_in_use() & unheld


class FakeRunner:
    """Stands in for outrider.engine.runner.Runner."""

    def __init__(self, block_size: int, max_step_rows: int) -> None:
        self._block_size = block_size
        self._max_step_rows = max_step_rows
        self._cache: dict[tuple[int, int], int] = {}
        self.rows_of_steps: list[list[int]] = []

    def make_tap(self, projection: FeatureProjection, num_blocks: int) -> FeatureTap:
        store = FeatureStore(
            num_blocks=num_blocks, block_size=self._block_size, width=projection.width
        )
        return FeatureTap(
            projection, store, hidden_size=HIDDEN_SIZE, max_rows=self._max_step_rows,
            dtype=torch.float32,
        )  # fmt: skip

    def forward(self, batch: Sequence[SequenceRows], tap: FeatureTap | None = None) -> np.ndarray:
        assert sum(len(rows.token_ids) for rows in batch) <= self._max_step_rows
        self.rows_of_steps.append([len(rows.token_ids) for rows in batch])
        logits = []
        prefixes: list[list[int]] = []
        slots: list[int] = []
        for rows in batch:
            for index, token_id in enumerate(rows.token_ids):
                self._cache[self._place(rows, rows.start + index)] = token_id
            end = rows.start + len(rows.token_ids)
            places = range(rows.start, end)
            if tap is not None:
                prefixes += [
                    [self._cache[self._place(rows, at)] for at in range(last + 1)]
                    for last in places
                ]
                slots += [self._slot(rows, at) for at in places]
            for position in range(end - rows.num_logits, end):
                prefix = [self._cache[self._place(rows, at)] for at in range(position + 1)]
                logits.append(logits_of(prefix))
        if tap is not None:
            # Layer 0 is one that nobody asked for.
            for layer in (0, *tap.projection.layer_ids):
                tap.capture(
                    layer, torch.stack([hidden_state_of(prefix, layer) for prefix in prefixes])
                )
            tap.keep(torch.tensor(slots), len(slots))
        return np.stack(logits) if logits else np.zeros((0, VOCAB_SIZE), np.float32)

    def _place(self, rows: SequenceRows, position: int) -> tuple[int, int]:
        return rows.block_table[position // self._block_size], position % self._block_size

    def _slot(self, rows: SequenceRows, position: int) -> int:
        block, offset = self._place(rows, position)
        return block * self._block_size + offset
