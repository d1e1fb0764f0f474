"""The EAGLE-3 drafter: what it does with features, time, memory and its own doubt."""

from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from head_play import (
    BLOCK_SIZE,
    GREEDY,
    NEVER,
    Played,
    RecordingRunner,
    drafter_of,
    largest_error,
    load_runner,
)
from scripted_guide import ScriptedGuide

from draft_service.drafters.drafter import NO_PROPOSAL, FeatureRows, Wish
from draft_service.drafters.eagle3 import Eagle3Drafter
from outrider.engine.eagle3.head_runner import HeadOutput
from outrider.engine.errors import StepError
from outrider.engine.sampling import Sampling
from outrider.engine.step import SequenceRows
from tests.engine.head_checkpoint import (
    EOS_TOKEN_ID,
    HIDDEN_SIZE,
    MAX_SEQUENCE_LENGTH,
    VOCAB_SIZE,
    flat_head,
    head_tensors,
)
from tests.engine.head_reference import ReferenceHead


@pytest.fixture
def runner(tmp_path: Path) -> RecordingRunner:
    return load_runner(flat_head(), tmp_path)


def ready(drafter: Eagle3Drafter, seed: int = 1, length: int = 20, **settings: object) -> Played:
    played = Played(drafter, seed, length, **settings)
    played.send()
    played.prepare()
    return played


def test_there_is_no_proposal_until_the_features_reach_the_last_token_but_one(
    runner: RecordingRunner,
) -> None:
    drafter = drafter_of(runner)
    behind, lone, full = Played(drafter, 1, 20), Played(drafter, 2, 1), ready(drafter, 3)
    wishes = [played.wish(3) for played in (behind, lone, full)]
    proposals = drafter.propose(wishes)
    assert proposals[:2] == [NO_PROPOSAL, NO_PROPOSAL]
    assert len(proposals[2].token_ids) == 3
    for end in (5, 18):
        behind.send(end)
        assert behind.propose(3) == []
    behind.send()
    behind.prepare()
    assert len(behind.propose(3)) == 3
    # A commit without its features.
    behind.commit([], 0, 4)
    assert behind.propose(3) == []
    assert runner.forwards[-1] == [1]


def test_backlog_counts_the_rows_that_can_be_run(runner: RecordingRunner) -> None:
    drafter = drafter_of(runner)
    played = Played(drafter, 1, 30)
    assert drafter.backlog(played.state) == 0
    played.send(10)
    assert drafter.backlog(played.state) == 10
    drafter.prepare([played.state], 0.014)
    assert (runner.forwards, drafter.backlog(played.state)) == ([[10]], 0)
    played.send()
    assert drafter.backlog(played.state) == 19
    # Features of the last token are of use when the token behind it is known.
    assert drafter.add_features(played.state, played.rows(29, 30))
    assert drafter.backlog(played.state) == 19
    played.commit([], 0, 5)
    assert drafter.backlog(played.state) == 20


def test_features_that_are_there_are_ignored_and_gaps_are_told(runner: RecordingRunner) -> None:
    drafter = drafter_of(runner)
    played, other = Played(drafter, 1, 40), Played(drafter, 1, 40)
    for text, pieces in ((played, [(0, 40)]), (other, [(0, 9), (0, 5), (3, 9), (4, 17), (17, 17)])):
        for first, end in pieces:
            assert drafter.add_features(text.state, text.rows(first, min(end, 39)))
    assert not drafter.add_features(other.state, other.rows(18, 39))
    other.prepare()
    assert other.state.next_position == 17
    assert drafter.add_features(other.state, other.rows(10, 39))
    played.prepare()
    other.prepare()
    assert played.propose(5) == other.propose(5)


def test_numbers_that_no_hidden_state_has_never_reach_the_cache(runner: RecordingRunner) -> None:
    drafter = drafter_of(runner)
    played = ready(drafter, 1, 20)
    played.commit([], 0, 3)
    for number in (float("nan"), float("inf"), -1e31):
        bad = torch.zeros(1, HIDDEN_SIZE, dtype=torch.bfloat16)
        bad[0, 5] = number
        rows = FeatureRows(first_position=19, rows=bad.view(torch.int16).numpy().tobytes())
        assert not drafter.add_features(played.state, rows)
    beyond = FeatureRows(first_position=MAX_SEQUENCE_LENGTH, rows=bytes(2 * HIDDEN_SIZE))
    assert not drafter.add_features(played.state, beyond)
    played.send()
    assert len(played.propose(4)) == 4


def test_a_prompt_is_run_in_pieces_of_bounded_size(runner: RecordingRunner) -> None:
    drafter = drafter_of(runner)
    texts = [Played(drafter, seed, 41) for seed in range(2)]
    for played in texts:
        played.send()
    while any(drafter.backlog(played.state) for played in texts):
        drafter.prepare([played.state for played in texts], 0.016)
    assert runner.forwards == [[16], [16], [8, 8], [16], [16]]


def test_one_forward_per_position_for_all_rows_and_accepted_rows_are_run_again(
    runner: RecordingRunner,
) -> None:
    drafter = drafter_of(runner)
    texts = [ready(drafter, seed, length) for seed, length in enumerate((3, 20, 50))]
    runner.forwards.clear()
    drafts = drafter.propose([played.wish(4) for played in texts])
    assert runner.forwards == [[1, 1, 1]] * 4
    runner.forwards.clear()
    for played, draft, accepted_length in zip(texts, drafts, (0, 2, 4), strict=True):
        played.commit(draft.token_ids, accepted_length, 1)
        played.send()
    drafter.propose([played.wish(2) for played in texts])
    assert runner.forwards == [[1, 3, 5], [1, 1, 1]]


@pytest.mark.parametrize(("patience", "length"), [(0.0, 1), (0.019, 1), (0.022, 2), (0.05, 4)])
def test_a_draft_is_as_long_as_its_time_allows(
    patience: float, length: int, runner: RecordingRunner
) -> None:
    # Every forward takes 10 ms.
    drafter = drafter_of(runner, clock=lambda: 5 + 0.01 * len(runner.forwards))
    texts = [ready(drafter, seed) for seed in range(2)]
    now = 5 + 0.01 * len(runner.forwards)
    drafts = drafter.propose([texts[0].wish(8, now + patience), texts[1].wish(8)])
    assert [len(draft.token_ids) for draft in drafts] == [length, 8]
    assert drafts[0].token_ids == texts[0].propose(length)


def test_a_draft_stops_behind_an_end_token(tmp_path: Path) -> None:
    files = flat_head(draft_vocab_size=VOCAB_SIZE)
    runner = load_runner(files, tmp_path)
    played = ready(drafter_of(runner), 1)
    draft = played.propose(6)
    # The same head, where the third token's place is taken by the end token.
    swapped = list(range(VOCAB_SIZE))
    end = draft.index(draft[2])
    swapped[draft[2]], swapped[EOS_TOKEN_ID] = EOS_TOKEN_ID, draft[2]
    files.tensors["d2t"] = torch.tensor(swapped) - torch.arange(VOCAB_SIZE)
    ending = ready(drafter_of(load_runner(files, tmp_path)), 1)
    found = ending.propose(6)
    assert found == [*draft[:end], EOS_TOKEN_ID]


def test_blocks_run_out_for_one_sequence_only_and_come_back_when_it_is_closed(
    runner: RecordingRunner,
) -> None:
    drafter = drafter_of(runner, num_blocks=4)
    first, second = ready(drafter, 1, 2 * BLOCK_SIZE), Played(drafter, 2, 2 * BLOCK_SIZE)
    assert drafter.reserve(second.state, 2 * BLOCK_SIZE + 1)
    assert not drafter.reserve(second.state, 2 * BLOCK_SIZE + 2)
    drafter.close(second.state)
    assert len(first.propose(4)) == 4
    drafter.close(first.state)
    again = Played(drafter, 3, 4 * BLOCK_SIZE)
    drafter.close(again.state)


class RestrictedRunner(RecordingRunner):
    """A head of which some tokens can never be drawn."""

    def __init__(self, runner: RecordingRunner, token_ids: Sequence[int]) -> None:
        super().__init__(runner.runner)
        self.token_ids = token_ids

    def forward(self, batch: Sequence[SequenceRows], features: torch.Tensor) -> HeadOutput:
        logits, next_features = self.runner.forward(batch, features)
        restricted = np.full_like(logits, -np.inf)
        restricted[:, self.token_ids] = logits[:, self.token_ids]
        return HeadOutput(restricted, next_features)


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        Sampling(temperature=1.0, seed=3),
        Sampling(temperature=0.7, top_k=12, seed=4),
        Sampling(temperature=1.2, top_p=0.8, min_p=0.01, seed=2**63),
    ],
    ids=str,
)
def test_noise_is_that_of_the_targets_token_ids(sampling: Sampling, tmp_path: Path) -> None:
    """A permuted part of a vocabulary proposes what the whole one, restricted to it, does."""
    whole = flat_head(draft_vocab_size=VOCAB_SIZE)
    order = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(8))[:50]
    part = flat_head(draft_vocab_size=50)
    part.tensors |= head_tensors(part.settings, 50)
    part.tensors |= {
        name: tensor for name, tensor in whole.tensors.items() if name not in ("d2t", "t2d")
    }
    part.tensors["lm_head.weight"] = whole.tensors["lm_head.weight"][order]
    part.tensors["d2t"] = order - torch.arange(50)
    part.tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill_(0, order, True)
    restricted = RestrictedRunner(load_runner(whole, tmp_path / "whole"), order.tolist())
    of_whole = [
        ready(drafter_of(restricted), seed, sampling=sampling).propose(6) for seed in range(4)
    ]
    runner = load_runner(part, tmp_path / "part")
    of_part = [ready(drafter_of(runner), seed, sampling=sampling).propose(6) for seed in range(4)]
    assert of_part == of_whole
    assert set().union(*of_part) <= set(order.tolist())
    assert len(set().union(*of_part)) > 6


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.5, seed=3)], ids=str)
def test_a_draft_ends_where_the_head_doubts_it(
    sampling: Sampling, runner: RecordingRunner, tmp_path: Path
) -> None:
    temperature = sampling.temperature or 1.0
    played = ready(drafter_of(runner), 3, sampling=sampling)
    draft = played.propose(6)
    target_ids = runner.head.weights.target_token_ids.tolist()
    products = []
    product = 1.0
    for logits, token_id in zip(runner.take_logits(played.state), draft, strict=True):
        row = torch.from_numpy(logits) / temperature
        product *= float(row.softmax(0)[target_ids.index(token_id)])
        products.append(product)
    for length in range(1, 6):
        # Between the product that shall stay and the one that shall not.
        bound = (products[length - 1] + products[length]) / 2
        other = ready(drafter_of(runner, min_probability=bound), 3, sampling=sampling)
        assert other.propose(6) == draft[:length]
    sure = ready(drafter_of(runner, min_probability=0.999999), 3, sampling=sampling)
    assert sure.propose(6) == draft[:1]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.5, seed=3)], ids=str)
def test_a_draft_goes_on_from_what_the_guide_chose(sampling: Sampling, tmp_path: Path) -> None:
    files = flat_head()
    runner, reference = load_runner(files, tmp_path), ReferenceHead(files)
    played = ready(drafter_of(runner), 3, sampling=sampling)
    own = played.propose(5)
    runner.take_logits(played.state)
    guide = ScriptedGuide({1: (own[1] + 1) % EOS_TOKEN_ID})
    (proposal,) = played.drafter.propose([played.wish(5)._replace(guide=guide)])
    draft = proposal.token_ids
    assert draft[:2] == [own[0], guide.replacements[1]]
    assert [asked[0] for asked in guide.asked] == [draft[:offset] for offset in range(len(draft))]
    assert [asked[1] for asked in guide.asked] == [*own[:2], *draft[2:]]
    # The head read the guide's token, not its own.
    found = runner.take_logits(played.state)[: len(draft)]
    assert largest_error(found, played.expected(reference, draft)) < 1e-4
    for (_, token_id, probability), logits in zip(guide.asked, found, strict=True):
        row = torch.from_numpy(logits) / (sampling.temperature or 1.0)
        index = list(reference.target_ids).index(token_id)
        assert probability == pytest.approx(float(row.softmax(0)[index]), rel=1e-4)


def test_a_token_of_the_guide_is_not_doubted(runner: RecordingRunner) -> None:
    played = ready(drafter_of(runner, min_probability=0.999999), 3)
    own = played.propose(6)
    assert len(own) == 1
    guide = ScriptedGuide({1: 5, 2: 6})
    (proposal,) = played.drafter.propose([played.wish(6)._replace(guide=guide)])
    assert proposal.token_ids == [*own, 5, 6]


def test_the_longest_sequence_is_drafted_for_to_its_end(runner: RecordingRunner) -> None:
    drafter = drafter_of(runner)
    played = ready(drafter, 1, MAX_SEQUENCE_LENGTH - 3)
    assert len(played.propose(3)) == 3


def test_rows_beyond_the_limits_are_refused(runner: RecordingRunner) -> None:
    features = torch.zeros(1, HIDDEN_SIZE)

    def rows(**changes: object) -> SequenceRows:
        given = {"token_ids": [1], "start": 0, "block_table": [1], "num_logits": 1}
        return SequenceRows(**(given | changes))

    for batch, words in (
        ([], "a step of 0 rows"),
        ([rows(token_ids=[])], "a sequence has 0 rows from place 0"),
        ([rows(start=8)], "block table of 1 blocks: must cover 9 rows"),
        ([rows(position_offset=400)], "rows reach position 400: must be below 400"),
        ([rows(), rows(block_table=[2])], r"features are \[1, 32\]: must be \[2, 32\]"),
    ):
        with pytest.raises(StepError, match=words):
            runner.forward(batch, features)


def test_a_wish_for_a_state_opened_anew_waits_for_its_features(runner: RecordingRunner) -> None:
    drafter = drafter_of(runner)
    state = drafter.open(array("i", [1, 2, 3]), GREEDY)
    assert drafter.reserve(state, 8)
    assert drafter.propose([Wish(state, 4, NEVER)]) == [NO_PROPOSAL]
    assert runner.forwards == []
