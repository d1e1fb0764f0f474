"""The EAGLE-3 drafter's logits against a full recomputation of every row from the equations."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from head_play import (
    Played,
    RecordingRunner,
    drafter_of,
    largest_error,
    load_runner,
)

from outrider.engine.feature_projection import load_projection
from outrider.engine.sampling import Sampling, sample
from tests.engine.head_checkpoint import (
    HIDDEN_SIZE,
    TRAINED_LENGTH,
    VOCAB_SIZE,
    HeadFiles,
    flat_head,
    speculators_head,
)
from tests.engine.head_reference import ReferenceHead

TOLERANCE = 1e-4
SAMPLED = Sampling(temperature=0.9, top_p=0.95, seed=4)

HEADS = {
    "flat": lambda: flat_head(),
    "normalised residual, biases, linear scaling": lambda: flat_head(
        norm_before_residual=True,
        attention_bias=True,
        rope_scaling={"type": "linear", "factor": 2.0},
    ),
    "normalised output, the target's head": lambda: flat_head(
        draft_vocab_size=None, norm_output=True
    ),
    "speculators": lambda: speculators_head(),
    "speculators, plain residual": lambda: speculators_head(norm_before_residual=False),
}


def check(
    played: Played, runner: RecordingRunner, reference: ReferenceHead, draft: Sequence[int]
) -> None:
    found = runner.take_logits(played.state)[: len(draft)]
    assert largest_error(found, played.expected(reference, draft)) < TOLERANCE
    position = len(played.token_ids)
    for index, logits in enumerate(found):
        everywhere = np.full(VOCAB_SIZE, -np.inf, dtype=np.float32)
        everywhere[reference.target_ids] = logits
        assert sample(everywhere, played.sampling, position + index) == draft[index]


@pytest.mark.parametrize("name", HEADS)
def test_a_turn_by_turn_conversation_gives_the_logits_of_a_full_recomputation(
    name: str, tmp_path: Path
) -> None:
    files: HeadFiles = HEADS[name]()
    runner, reference = load_runner(files, tmp_path), ReferenceHead(files)
    drafter = drafter_of(runner)
    texts = [
        Played(drafter, 1, 45),  # prefilled in chunks; longer than the head was trained for
        Played(drafter, 2, 4, sampling=SAMPLED),
        Played(drafter, 3, 130, first_feature=100),  # features begin late
    ]
    texts[0].send(20)
    texts[0].prepare()
    for played in texts:
        played.send()
        played.prepare()
    random = np.random.default_rng(0)
    lengths = set()
    for turn in range(12):
        asking = [played for played in texts if turn < 2 or random.random() < 0.8]
        if not asking:
            continue
        wishes = [played.wish(int(random.integers(1, 6))) for played in asking]
        for played, wish, proposal in zip(asking, wishes, drafter.propose(wishes), strict=True):
            draft = proposal.token_ids
            lengths.add(len(draft))
            assert 1 <= len(draft) <= wish.draft_length
            check(played, runner, reference, draft)
            # From nothing to everything is accepted, and now and then more is committed.
            played.commit(draft, int(random.integers(0, len(draft) + 1)), turn)
            played.token_ids.extend(range(int(random.integers(0, 3))))
            played.send()
    assert lengths == {1, 2, 3, 4, 5}
    assert min(len(played.token_ids) for played in texts) > TRAINED_LENGTH


def test_after_a_resync_drafts_go_on_from_the_features_that_came(tmp_path: Path) -> None:
    files = flat_head()
    runner, reference = load_runner(files, tmp_path), ReferenceHead(files)
    drafter = drafter_of(runner)
    played, other = Played(drafter, 1, 60), Played(drafter, 2, 60)
    for text in (played, other):
        text.send()
        text.prepare()
    played.commit(played.propose(4), 2, 7)
    runner.take_logits(played.state)
    for first_feature in (0, 30, len(played.token_ids) - 2):
        played.reopen(first_feature)
        played.send()
        played.prepare()
        draft = played.propose(3)
        check(played, runner, reference, draft)
        played.commit(draft, 3, 11)
        played.send()
        check(played, runner, reference, played.propose(2))
    check(other, runner, reference, other.propose(5))


def test_the_prompts_last_row_waits_for_the_token_behind_it(tmp_path: Path) -> None:
    files = flat_head()
    runner, reference = load_runner(files, tmp_path), ReferenceHead(files)
    played = Played(drafter_of(runner), 5, 24)
    # Chunk by chunk, as a target prefills: the row of a chunk's last token takes the next token.
    for end in (8, 16, 23):
        played.send(end)
        played.prepare()
    played.commit([], 0, 33)
    played.send()
    draft = played.propose(4)
    check(played, runner, reference, draft)


def test_asking_again_gives_the_same_draft_even_behind_a_rolled_back_one(tmp_path: Path) -> None:
    files = flat_head()
    runner, reference = load_runner(files, tmp_path), ReferenceHead(files)
    played = Played(drafter_of(runner), 5, 30)
    played.send()
    first = played.propose(5)
    check(played, runner, reference, first)
    for draft_length in (2, 5):
        again = played.propose(draft_length)
        assert again == first[:draft_length]
        check(played, runner, reference, again)
    played.commit(first, 0, (first[0] + 1) % VOCAB_SIZE)
    played.send()
    check(played, runner, reference, played.propose(4))


def test_a_batch_gives_each_sequence_what_it_gets_alone(tmp_path: Path) -> None:
    files = flat_head()
    runner = load_runner(files, tmp_path, max_step_rows=8)
    drafter = drafter_of(runner)
    lengths = (3, 9, 31, 32, 33, 65, 140, 2, 17, 50)
    batch = [Played(drafter, seed, length) for seed, length in enumerate(lengths)]
    for played in batch:
        played.send()
        played.prepare()
        played.commit([], 0, 1)
        played.send()
    runner.forwards.clear()
    together = [
        proposal.token_ids for proposal in drafter.propose([played.wish(4) for played in batch])
    ]
    # One forward per position, in steps of at most eight rows.
    assert all(sum(rows) <= 8 for rows in runner.forwards)
    reference = ReferenceHead(files)
    for played, draft in zip(batch, together, strict=True):
        check(played, runner, reference, draft)
        assert played.propose(4) == draft


@pytest.mark.parametrize("window", [1, 20])
def test_a_window_drops_whole_blocks_and_gives_them_back(window: int, tmp_path: Path) -> None:
    files = flat_head()
    runner, reference = load_runner(files, tmp_path), ReferenceHead(files)
    drafter = drafter_of(runner, window=window)
    played = Played(drafter, 5, 100)
    played.send()
    played.prepare(0.001)
    for turn in range(12):
        draft = played.propose(5)
        check(played, runner, reference, draft)
        state = played.state
        kept = state.next_position - state.first_position
        # What the turn's own rows added came behind the drop.
        assert window <= kept < window + runner.block_size + runner.max_step_rows
        assert state.first_position % runner.block_size == 0
        assert len(state.block_table) * runner.block_size < kept + 3 * runner.block_size
        played.commit(draft, 2, turn)
        played.send()
    drafter.close(played.state)
    assert drafter._pool.num_used == 0


@pytest.mark.parametrize(
    "settings", [{}, {"bias": True, "fc_norm": True}, {"use_aux_norm": True}, {"norm_before_fc": 1}]
)
def test_the_projection_that_is_sent_is_the_heads_own(
    settings: dict[str, object], tmp_path: Path
) -> None:
    files = flat_head(**{name: bool(value) for name, value in settings.items()})
    runner = load_runner(files, tmp_path)
    needs = drafter_of(runner).offer.feature_needs
    projection = load_projection(needs.projection, hidden_size=HIDDEN_SIZE, dtype=torch.float32)
    assert projection.sha256 == needs.projection_sha256
    assert projection.layer_ids == needs.layer_ids == (2, 4, 5)
    assert (needs.width, needs.dtype, needs.target_hidden_size) == (HIDDEN_SIZE, "bfloat16", 32)
    captured = torch.randn(5, 3 * HIDDEN_SIZE, generator=torch.Generator().manual_seed(2))
    wanted = ReferenceHead(files).project(captured).to(torch.bfloat16)
    torch.testing.assert_close(projection.project(captured), wanted)
