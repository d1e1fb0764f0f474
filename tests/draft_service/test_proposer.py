"""Turns of the engine thread: batches over links, work in between, nothing kept."""

import gc
import time
from collections.abc import Sequence

import pytest
from fake_runner import FakeRunner, next_token, pool_of
from link_client import Row, drafts_in, hello, open_of
from proposer_client import Driver

from draft_service.drafters.ngram_drafter import NgramDrafter, NgramSequence
from draft_service.drafters.standalone import StandaloneDrafter, StandaloneSequence
from draft_service.link_sessions import terms_of
from draft_service.proposer import BUSY_PIECE_SECONDS, IDLE_PIECE_SECONDS
from draft_service.sessions import Session
from outrider.engine.sampling import Sampling
from outrider.serving.columns import pack
from outrider.v1 import draft_pb2

TEXT = [10, 11, 12, 13] * 4
LOOP = [10, 11, 12, 13]
CAPACITY = draft_pb2.REFUSE_REASON_CAPACITY
TOO_LONG = draft_pb2.REFUSE_REASON_TOO_LONG


def standalone(num_blocks: int = 50, **settings: int) -> StandaloneDrafter:
    return StandaloneDrafter(
        runner=FakeRunner(**settings),
        block_pool=pool_of(num_blocks),
        eos_token_ids=frozenset(),
        fingerprint="fake",
        step_seconds=((1, 0.01),),
    )


def continued(text: list[int], count: int) -> list[int]:
    greedy = Sampling(temperature=0.0)
    whole = list(text)
    for _ in range(count):
        whole.append(next_token(0, whole, greedy))
    return whole[len(text) :]


def sequences_alive() -> int:
    gc.collect()
    kinds = (Session, NgramSequence, StandaloneSequence)
    return sum(type(thing) in kinds for thing in gc.get_objects())


@pytest.mark.parametrize("make", [NgramDrafter, standalone])
def test_nothing_is_left_of_ten_thousand_sequences(make) -> None:
    alive = sequences_alive()
    drafter = make()
    driver = Driver(drafter, max_sequences=3)
    for cycle in range(2500):
        sequences = [(slot, TEXT) for slot in range(4)]
        driver.open(*sequences, generation=cycle)
        if cycle % 50 == 0:
            driver.step(*(Row(slot, TEXT, 0, generation=cycle) for slot in range(4)))
        driver.receive(
            close=draft_pb2.CloseBatch(
                **driver.client.stamps(),
                slots=pack(range(4), "<u4"),
                generations=pack([cycle] * 4, "<u4"),
            )
        )
        driver.answers()
    assert driver.client.rows_seen("refuse")[:1] == [(3, 0, CAPACITY)]
    driver.client.seen.clear()
    assert driver.proposer.session_count == 0
    assert not driver.proposer.has_unprepared
    assert sequences_alive() == alive
    # All blocks are there again.
    driver.open((0, [5] * 200 if make is standalone else TEXT))
    assert driver.proposer.session_count == 1
    driver.proposer.detach(driver.terms)
    assert driver.proposer.session_count == 0


def test_the_steps_of_several_targets_are_proposed_for_in_one_batch() -> None:
    drafter = standalone()
    first = Driver(drafter)
    first.open((0, TEXT))
    second_hello = hello(8)
    second = terms_of(second_hello)
    first.proposer.attach(second)
    first.proposer.receive(
        second,
        draft_pb2.LinkRequest(
            open=draft_pb2.OpenBatch(
                target_boot_id=8, stream_epoch=1, sequences=[open_of(0, [20, 21])]
            )
        ),
        time.monotonic(),
    )
    first.prepare()
    runner = drafter._runner
    runner.forwards.clear()
    first.receive(step=first.client.step_of(Row(0, TEXT, 0, draft_length=3)))
    step = first.client.step_of(Row(0, [20, 21], 0, draft_length=2))
    step.target_boot_id = 8
    first.proposer.receive(second, draft_pb2.LinkRequest(step=step), time.monotonic())
    first.proposer.propose()
    answers = dict(first.proposer.take_answers())
    assert drafts_in(answers[first.terms].draft) == {0: continued(TEXT, 3)}
    assert drafts_in(answers[second].draft) == {0: continued([20, 21], 2)}
    assert [len(forward) for forward in runner.forwards] == [2, 2, 1]


def test_an_older_step_in_the_same_turn_is_answered_empty() -> None:
    driver = Driver(NgramDrafter())
    driver.open((0, TEXT))
    driver.receive(step=driver.client.step_of(Row(0, [*TEXT, 10])))
    driver.receive(step=driver.client.step_of(Row(0, [*TEXT, 10, 11])))
    older, newer = driver.answers()
    assert drafts_in(older.draft) == {0: []}
    assert drafts_in(newer.draft) == {0: [12, 13, 10, 11]}


def test_what_is_closed_or_replaced_behind_a_step_in_the_same_turn_gets_no_draft() -> None:
    driver = Driver(NgramDrafter())
    driver.open((0, TEXT), (1, TEXT))
    driver.receive(step=driver.client.step_of(Row(0, TEXT, 0), Row(1, TEXT, 0)))
    driver.receive(
        close=draft_pb2.CloseBatch(
            **driver.client.stamps(), slots=pack([0], "<u4"), generations=pack([1], "<u4")
        )
    )
    driver.open((1, TEXT), generation=2)
    (answer,) = driver.answers()
    assert drafts_in(answer.draft) == {0: [], 1: []}


def test_a_detached_link_takes_its_pending_steps_along() -> None:
    driver = Driver(NgramDrafter())
    driver.open((0, TEXT))
    driver.receive(step=driver.client.step_of(Row(0, TEXT, 0)))
    driver.proposer.detach(driver.terms)
    driver.proposer.propose()
    assert driver.proposer.session_count == 0


def test_a_sequence_that_fell_behind_is_prepared_before_it_gets_drafts_again() -> None:
    driver = Driver(standalone())
    text = [1, 2, 3]
    driver.open((0, text))
    driver.prepare()
    assert drafts_in(driver.step(Row(0, text, 0))) == {0: continued(text, 4)}
    text = [*text, *range(40)]
    assert drafts_in(driver.step(Row(0, text, 40))) == {0: []}
    assert driver.proposer.has_unprepared
    driver.prepare()
    assert drafts_in(driver.step(Row(0, text, 0))) == {0: continued(text, 4)}


def test_a_sequence_without_blocks_is_refused_and_the_others_go_on() -> None:
    driver = Driver(standalone(num_blocks=9))
    driver.open((0, TEXT), (1, TEXT))
    driver.prepare()
    assert drafts_in(driver.step(Row(0, TEXT, 0), Row(1, TEXT, 0))) == {
        0: continued(TEXT, 4),
        1: [],
    }
    assert driver.client.rows_seen("refuse") == [(1, 1, CAPACITY)]
    driver.open((1, TEXT[:8]))
    driver.prepare()
    assert drafts_in(driver.step(Row(1, TEXT[:8], 0))) == {1: continued(TEXT[:8], 4)}


def test_drafts_end_at_the_longest_sequence() -> None:
    driver = Driver(standalone(max_sequence_length=20))
    text = TEXT[:15]
    driver.open((0, text))
    driver.prepare()
    for length, expected in ((16, 4), (18, 2), (19, 1), (20, 0)):
        more = continued(text, length - len(text))
        text = [*text, *more]
        draft = drafts_in(driver.step(Row(0, text, len(more), draft_length=8)))
        assert draft == {0: continued(text, expected)}
    draft = drafts_in(driver.step(Row(0, [*text, 1])))
    assert draft == {0: []}
    assert driver.client.rows_seen("refuse") == [(0, 1, TOO_LONG)]


def test_features_are_ignored_where_none_are_needed() -> None:
    driver = Driver(NgramDrafter())
    driver.open((0, TEXT))
    draft = driver.step(Row(0, TEXT, 0), inline_features=b"abc", shared_memory_offsets=b"12345")
    assert drafts_in(draft) == {0: LOOP}


class BudgetKeeper(NgramDrafter):
    """Keeps the budgets that it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.budgets: list[float] = []

    def prepare(self, states: Sequence[NgramSequence], budget_seconds: float) -> None:
        self.budgets.append(budget_seconds)
        super().prepare(states, budget_seconds)


def test_pieces_of_preparation_are_small_only_while_drafts_are_asked_for() -> None:
    drafter = BudgetKeeper()
    driver = Driver(drafter)
    driver.open((0, TEXT))
    driver.prepare()
    driver.step(Row(0, TEXT, 0))
    driver.open((1, TEXT))
    driver.prepare()
    assert drafter.budgets == [IDLE_PIECE_SECONDS, BUSY_PIECE_SECONDS]


def test_memory_is_there_for_what_is_committed_whatever_becomes_of_the_row() -> None:
    drafter = standalone(num_blocks=50)
    driver = Driver(drafter)
    driver.open((0, TEXT))
    # Longer than Hello announced, and so many commits that they are worked on between steps.
    text = [*TEXT, *range(100)]
    driver.step(Row(0, text, 100, draft_length=255))
    assert driver.counters.of("draft lengths out of bounds") == 1
    while driver.proposer.has_unprepared:
        driver.proposer.prepare()
    assert drafts_in(driver.step(Row(0, text, 0))) == {0: continued(text, 4)}
