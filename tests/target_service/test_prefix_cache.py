"""Sequences that begin alike begin behind what is in the cache: the same tokens, fewer rows, and no
block lost.
"""

import random
from collections.abc import Sequence

import pytest
from fake_engine import VOCAB_SIZE, oracle
from test_feature_steps import Harness as FeatureHarness
from test_step_loop import (
    BLOCK_SIZE,
    DRAFT_LENGTH,
    GREEDY,
    Harness,
    no_draft,
    random_draft,
    right_draft,
)

from outrider.engine.sampling import Sampling
from target_service.block_names import extend_names


def text(length: int, salt: int = 0) -> list[int]:
    generator = random.Random(salt)
    return [generator.randrange(VOCAB_SIZE) for _ in range(length)]


def ask(
    harness: Harness, sequence_id: int, prompt: Sequence[int], max_tokens: int = 5
) -> tuple[list[int], int, int]:
    """Runs one sequence to its end: output, tokens of its prompt that were cached, rows computed
    of its prompt.
    """
    before = len(harness.runner.rows_of_steps)
    harness.admit(sequence_id, prompt, max_tokens, GREEDY)
    harness.run()
    outcomes = harness.sink.outcomes[sequence_id]
    assert not any(outcome.cached_prompt_length for outcome in outcomes[1:])
    rows = sum(map(sum, harness.runner.rows_of_steps[before:]))
    output = harness.sink.tokens(sequence_id)
    return output, outcomes[0].cached_prompt_length, rows - len(output) + 1


def test_a_prompt_that_was_there_before_is_computed_from_its_last_full_block_on() -> None:
    harness = Harness(no_draft)
    prompt = text(5 * BLOCK_SIZE + 3)
    assert ask(harness, 1, prompt) == (oracle(prompt, GREEDY, 5), 0, len(prompt))
    cached = 5 * BLOCK_SIZE
    assert ask(harness, 2, prompt) == (oracle(prompt, GREEDY, 5), cached, 3)
    # Its answer is in the cache as well, but for the last token, which no step has read.
    longer = [*prompt, *oracle(prompt, GREEDY, 5), *text(4, salt=1)]
    cached = (len(prompt) + 4) // BLOCK_SIZE * BLOCK_SIZE
    assert ask(harness, 3, longer)[1:] == (cached, len(longer) - cached)
    # Another beginning shares nothing, however alike the rest is.
    other = [(prompt[0] + 1) % VOCAB_SIZE, *prompt[1:]]
    assert ask(harness, 4, other) == (oracle(other, GREEDY, 5), 0, len(other))
    assert harness.statistics.prompt_tokens == 2 * len(prompt) + len(longer) + len(other)
    assert harness.statistics.cached_prompt_tokens == 5 * BLOCK_SIZE + cached


@pytest.mark.parametrize("beyond", [0, 1, BLOCK_SIZE - 1])
def test_a_prompts_last_token_is_computed_even_where_all_of_it_was_there(beyond: int) -> None:
    """At one token behind the blocks the very first row is a decode row."""
    harness = Harness(no_draft)
    prompt = text(3 * BLOCK_SIZE + beyond)
    ask(harness, 1, prompt)
    output, cached, rows = ask(harness, 2, prompt)
    assert output == oracle(prompt, GREEDY, 5)
    assert cached == (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert rows == len(prompt) - cached


def test_sequences_that_run_beside_each_other_share_their_blocks() -> None:
    harness = Harness(no_draft, num_blocks=40)
    prompt = text(8 * BLOCK_SIZE)
    harness.admit(0, [*prompt, 1], 40, GREEDY)
    while not harness.scheduler.running or not harness.scheduler.running[0].is_decoding:
        harness.loop.step()
    alone = harness.pool.num_used
    for sequence_id in range(1, 6):
        harness.admit(sequence_id, [*prompt, 1 + sequence_id], 40, GREEDY)
    harness.loop.step()
    assert len(harness.scheduler.running) == 6
    # Not eight blocks more for each.
    assert harness.pool.num_used <= alone + 5 * 2
    harness.run()
    for sequence_id in range(6):
        assert harness.sink.tokens(sequence_id) == oracle([*prompt, 1 + sequence_id], GREEDY, 40)
    assert harness.scheduler.preemptions == 0


def test_without_the_cache_everything_is_computed() -> None:
    harness = Harness(no_draft, caches_prefixes=False)
    prompt = text(40)
    for sequence_id in (1, 2):
        assert ask(harness, sequence_id, prompt)[1:] == (0, len(prompt))
    assert harness.pool.num_cached == 0
    assert harness.pool.num_free == harness.pool.num_blocks - 1


def test_a_preempted_sequence_comes_back_to_what_is_left_of_its_blocks() -> None:
    harness = Harness(no_draft, num_blocks=16)
    harness.admit(1, text(40), 60, GREEDY)
    for _ in range(8):
        harness.loop.step()
    (sequence,) = harness.scheduler.running
    length = sequence.cached_length
    harness.scheduler.preempt(sequence)
    before = len(harness.runner.rows_of_steps)
    harness.loop.step()
    assert harness.runner.rows_of_steps[before] == [1 + length % BLOCK_SIZE]
    harness.run()
    assert harness.sink.tokens(1) == oracle(text(40), GREEDY, 60)
    # What it found of itself is nobody's cached prompt.
    assert harness.statistics.cached_prompt_tokens == 0


@pytest.mark.parametrize("propose", [no_draft, right_draft], ids=["plain", "with drafts"])
def test_chats_of_ten_turns_find_all_that_can_be_found(propose: object) -> None:
    harness = Harness(propose, num_blocks=400)  # type: ignore[arg-type]
    possible = found = 0
    chats = {chat: text(30, salt=chat) for chat in range(4)}
    for turn in range(10):
        for chat, tokens in chats.items():
            prompt = [*tokens, *text(7, salt=100 * turn + chat)]
            output, cached, _ = ask(harness, 10 * turn + chat, prompt, max_tokens=9)
            assert output == oracle(prompt, GREEDY, 9)
            if turn:
                # All of the chat so far but the token that was emitted last, in whole blocks.
                possible += (len(tokens) - 1) // BLOCK_SIZE * BLOCK_SIZE
                found += cached
            chats[chat] = [*prompt, *output]
    assert found == possible > 3000


@pytest.mark.parametrize("num_blocks", [64, 11], ids=["enough blocks", "preemption"])
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_changes_a_token_or_loses_a_block(
    num_blocks: int, runs_ahead: bool, seed: int
) -> None:
    play(num_blocks=num_blocks, runs_ahead=runs_ahead, seed=seed, count=60)


@pytest.mark.full
@pytest.mark.parametrize("runs_ahead", [False, True], ids=["step by step", "ahead"])
def test_ten_thousand_sequences_through_a_cache_much_too_small_for_them(runs_ahead: bool) -> None:
    play(num_blocks=11, runs_ahead=runs_ahead, seed=9, count=10_000)


def play(*, num_blocks: int, runs_ahead: bool, seed: int, count: int) -> None:
    """Prompts that begin alike, cancellations, drafts that are right and wrong, all at random."""
    generator = random.Random(seed)
    random.seed(seed)
    harness = Harness(random_draft, num_blocks=num_blocks, runs_ahead=runs_ahead)
    beginnings = [text(length, salt=length) for length in (5, 16, 23, 24, 31)]
    expected: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    pool = harness.pool
    for sequence_id in range(count):
        start = generator.choice(beginnings)
        prompt = start[: generator.randrange(1, len(start) + 1)]
        prompt += [generator.randrange(2) for _ in range(generator.randrange(12))]
        sampling = Sampling(
            temperature=generator.choice([0.0, 0.8]), seed=generator.randrange(3), top_k=5
        )
        max_tokens = generator.randrange(1, 30)
        stops = frozenset(generator.sample(range(VOCAB_SIZE), generator.random() < 0.25))
        expected[sequence_id] = oracle(prompt, sampling, max_tokens, stops)
        harness.admit(sequence_id, prompt, max_tokens, sampling, stops)
        for _ in range(generator.randrange(2, 14)):
            if generator.random() < 0.1:
                harness.set_policy(rules=((9, generator.choice([0, DRAFT_LENGTH])),))
            if generator.random() < 0.03:
                victim = generator.choice(list(expected))
                cancelled.add(victim)
                harness.loop.cancel(harness.sink, frozenset([victim]))
            if harness.scheduler.has_work:
                harness.loop.step()
            tables = [set(one.block_table) for one in harness.scheduler.running]
            assert pool.num_used == len(set().union(*tables))
            assert pool.num_free + pool.num_cached + pool.num_used == num_blocks - 1
        while harness.scheduler.num_waiting > 20:
            harness.loop.step()
    harness.run()
    for sequence_id, tokens in expected.items():
        got = harness.sink.tokens(sequence_id) if sequence_id in harness.sink.outcomes else []
        assert got == (tokens[: len(got)] if sequence_id in cancelled else tokens), sequence_id
    assert harness.statistics.cached_prompt_tokens > 0
    assert (harness.scheduler.preemptions > 0) == (num_blocks == 11)


@pytest.mark.parametrize("length", [41, 43, 48])
def test_a_head_is_given_the_features_of_what_was_found(length: int) -> None:
    """What is given is checked by the peer that takes it, row by row."""
    harness = FeatureHarness()
    harness.link(harness.make_tap())
    prompt = [(index * 5 + 3) % VOCAB_SIZE for index in range(length)]
    given = []
    for sequence_id in range(2):
        first = len(harness.peer.steps)
        harness.admit(prompt, 21)
        harness.finish()
        rows = [row for step in harness.peer.steps[first:] for row in step]
        given.append(sum(row.feature_count for row in rows))
        assert harness.statistics.cached_prompt_tokens == 40 * sequence_id
    # All of the prompt, and of the output what a draft was still asked behind.
    assert given[0] == given[1] >= len(prompt) + 10
    # The peer's drafts are right: a hit changes nothing about their acceptance.
    assert harness.statistics.accepted_tokens == harness.statistics.draft_tokens


def test_names_follow_from_all_tokens_up_to_a_blocks_end() -> None:
    tokens = text(4 * BLOCK_SIZE)
    names: list[bytes] = []
    extend_names(names, tokens, count=4, block_size=BLOCK_SIZE)
    assert len(set(names)) == 4
    in_pieces: list[bytes] = []
    for count in (0, 1, 1, 4):
        extend_names(in_pieces, tokens, count=count, block_size=BLOCK_SIZE)
    assert in_pieces == names
    for changed in (0, BLOCK_SIZE - 1, BLOCK_SIZE, 4 * BLOCK_SIZE - 1):
        other = list(tokens)
        other[changed] += 1
        others: list[bytes] = []
        extend_names(others, other, count=4, block_size=BLOCK_SIZE)
        same = [one == two for one, two in zip(names, others, strict=True)]
        assert same == [index < changed // BLOCK_SIZE for index in range(4)]
    # Two blocks of the same tokens are two texts.
    twice: list[bytes] = []
    extend_names(twice, [1] * 2 * BLOCK_SIZE, count=2, block_size=BLOCK_SIZE)
    assert twice[0] != twice[1]
