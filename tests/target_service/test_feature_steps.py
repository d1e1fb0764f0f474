"""What is sent of features: step loop, link's memory and store over the fake model, by hand."""

import random
from collections.abc import Iterator
from contextlib import nullcontext

import numpy as np
import pytest
from fake_engine import FakeRunner, FakeSteps, LateSteps, oracle
from feature_peer import ROW_BYTES, FeaturePeer, projection
from test_step_loop import Collector

from outrider.engine.feature_tap import FeatureTap
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import Sampling
from outrider.serving.shared_ring import SharedRing, random_ring_name
from outrider.v1 import draft_pb2
from target_service import link_features
from target_service.draft_wait import DraftWait
from target_service.link_features import LinkFeatures
from target_service.link_mailbox import LinkMailbox, LinkView
from target_service.linked_drafts import LinkedDrafts
from target_service.policy import Policy
from target_service.scheduler import Scheduler, SchedulerBounds
from target_service.sequence import Request
from target_service.statistics import Statistics
from target_service.step_loop import StepLoop

DRAFT_LENGTH = 4
BLOCK_SIZE = 8
GREEDY = Sampling(temperature=0.0)


class Harness:
    """A target's engine side whose draft service answers at once."""

    def __init__(
        self, *, num_blocks: int = 64, max_running: int = 8, runs_ahead: bool = False
    ) -> None:
        self.statistics = Statistics(DRAFT_LENGTH)
        self.mailbox = LinkMailbox(self.statistics)
        self.peer = FeaturePeer(self.mailbox)
        self.num_blocks = num_blocks
        self.num_unsent = 0
        self.epoch = 0
        self.drafts = LinkedDrafts(
            mailbox=self.mailbox,
            send=lambda epoch, messages: self.peer.send(epoch, messages),
            num_unsent=lambda: self.num_unsent,
            target_boot_id=99,
            num_slots=max_running,
            vocab_size=24,
            wait=DraftWait([(1, 1.0), (64, 1.0)]),
            statistics=self.statistics,
        )
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            SchedulerBounds(
                max_running_sequences=max_running,
                max_waiting_sequences=64,
                max_step_rows=64,
                max_prefill_rows=16,
                block_size=BLOCK_SIZE,
                caches_prefixes=True,
            ),
            on_preempt=self.drafts.stopped,
        )
        self.runner = FakeRunner(BLOCK_SIZE, 64)
        self.late = LateSteps(self.runner)
        self.loop = StepLoop(
            engine=self.late if runs_ahead else FakeSteps(self.runner),
            ahead=self.late if runs_ahead else None,
            scheduler=self.scheduler,
            drafts=self.drafts,
            statistics=self.statistics,
            max_step_rows=64,
            activity=lambda name: nullcontext(),
        )
        self.sink = Collector()
        self.expected: dict[int, list[int]] = {}
        self.set_policy()

    def set_policy(self, max_decode_rows: int | None = None, draft_length: int = DRAFT_LENGTH):  # type: ignore[no-untyped-def]
        self.loop.set_policy(Policy(rules=((64, draft_length),), max_decode_rows=max_decode_rows))

    def make_tap(self, seed: int = 0) -> FeatureTap:
        return self.runner.make_tap(projection(seed), self.num_blocks)

    def link(self, tap: FeatureTap | None, ring: SharedRing | None = None) -> None:
        """A stream of another draft process."""
        self.epoch += 1
        reader = self.peer.reader
        self.peer = FeaturePeer(self.mailbox, reader=reader)
        if tap is not None:
            self.peer.projection = tap.projection
        self.mailbox.open_stream(
            LinkView(
                stream_epoch=self.epoch,
                draft_boot_id=self.peer.boot_id,
                max_draft_length=DRAFT_LENGTH,
                max_sequence_length=1000,
                features=None if tap is None else LinkFeatures(tap=tap, ring=ring),
            )
        )

    def admit(self, prompt: list[int], max_tokens: int, sampling: Sampling = GREEDY) -> None:
        sequence_id = len(self.expected)
        self.expected[sequence_id] = oracle(prompt, sampling, max_tokens)
        self.loop.admit(
            [
                Request(
                    sink=self.sink, sequence_id=sequence_id, prompt_token_ids=tuple(prompt),
                    resumed_output_token_ids=(), max_tokens=max_tokens, sampling=sampling,
                    stop_token_ids=frozenset(), deadline=None, priority=0,
                    draft_length_override=None, patience_seconds=0.0,
                )
            ]
        )  # fmt: skip

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.loop.step()

    def finish(self) -> None:
        for _ in range(3000):
            if not self.scheduler.has_work:
                break
            self.loop.step()
        assert {key: self.sink.tokens(key) for key in self.expected} == self.expected
        assert not self.pool.num_used

    def last_row(self):  # type: ignore[no-untyped-def]
        (row,) = self.peer.steps[-1]
        return row


@pytest.fixture
def small_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of ten rows of features, forty in a step."""
    monkeypatch.setattr(link_features, "MAX_MESSAGE_FEATURE_BYTES", 10 * ROW_BYTES + 3)


@pytest.fixture
def ring() -> Iterator[tuple[SharedRing, SharedRing]]:
    reader = SharedRing.create(random_ring_name(), 8 * 10 * ROW_BYTES + 5)
    writer = SharedRing.attach(reader.name)
    yield reader, writer
    reader.close()


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(index * 7 + salt) % 24 for index in range(length)]


def test_a_steady_step_sends_the_accepted_positions_and_one_more_and_nothing_else() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    harness.admit(prompt_of(9), 40)
    harness.steps(1)
    row = harness.last_row()
    # The prompt's features with the first ask; the token that was just sampled has none.
    assert (row.base_length, row.feature_count, row.draft_length) == (10, 9, DRAFT_LENGTH)
    for _ in range(5):
        before = len(harness.sink.tokens(0))
        harness.steps(1)
        committed = len(harness.sink.tokens(0)) - before
        row = harness.last_row()
        assert row.commit_count == row.feature_count == committed == DRAFT_LENGTH + 1
    assert len(harness.peer.messages) == 6
    assert harness.statistics.feature_rows["inline"] == 9 + 5 * (DRAFT_LENGTH + 1)
    assert harness.statistics.feature_bytes["inline"] == ROW_BYTES * (9 + 5 * (DRAFT_LENGTH + 1))
    assert harness.statistics.step_message_bytes == sum(
        message.ByteSize() for message in harness.peer.messages
    )
    harness.finish()


def test_rejected_tokens_leave_no_features_behind() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    answer = harness.peer._answer
    generator = random.Random(3)

    def bent(step, drafts):  # type: ignore[no-untyped-def]
        answer(step, [[t if generator.random() < 0.6 else (t + 1) % 24 for t in d] for d in drafts])

    harness.peer._answer = bent  # type: ignore[method-assign]
    for salt in range(4):
        harness.admit(prompt_of(5, salt), 60, Sampling(temperature=0.8, seed=salt))
    harness.finish()
    statistics = harness.statistics
    assert 0.1 < statistics.accepted_tokens / statistics.draft_tokens < 0.9
    for row in (row for step in harness.peer.steps[1:] for row in step):
        assert row.feature_count == row.commit_count


def test_without_a_need_for_features_none_are_captured_kept_or_sent() -> None:
    harness = Harness()
    harness.link(None)
    assert harness.drafts.tap() is None
    harness.peer.is_checking = False
    harness.admit(prompt_of(9), 20)
    harness.finish()
    assert harness.statistics.accepted_tokens > 10
    assert not any(harness.statistics.feature_rows.values())
    assert not any(
        message.feature_counts or message.feature_first_positions or message.inline_features
        for message in harness.peer.messages
    )


def test_a_prompts_features_go_out_chunk_by_chunk_while_it_is_worked_on() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    harness.admit(prompt_of(3), 60)
    harness.steps(2)
    harness.admit(prompt_of(50, 5), 20)
    sent = len(harness.peer.steps)
    harness.steps(4)
    chunks = [row for step in harness.peer.steps[sent:] for row in step if row.base_length >= 50]
    assert [(row.feature_count, row.commit_count, row.draft_length) for row in chunks] == [
        (16, 0, 0), (16, 0, 0), (16, 0, 0), (2, 1, DRAFT_LENGTH),
    ]  # fmt: skip
    harness.finish()


def test_a_prompt_alone_is_sent_chunk_by_chunk_too_unless_bypassed() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    harness.admit(prompt_of(100), 5)
    harness.steps(1)
    assert [(row.feature_count, row.draft_length) for row in harness.peer.steps[0]] == [(64, 0)]
    harness.finish()


def test_nothing_is_sent_in_a_bypass_and_everything_missing_behind_it() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    harness.admit(prompt_of(9), 200)
    harness.steps(3)
    told = harness.last_row().base_length
    messages = len(harness.peer.messages)
    harness.set_policy(max_decode_rows=0)
    harness.steps(31)
    assert len(harness.peer.messages) == messages
    harness.set_policy()
    harness.steps(1)
    row = harness.last_row()
    assert row.commit_count == row.feature_count == row.base_length - told > 31
    assert row.draft_length == DRAFT_LENGTH
    harness.finish()


def test_a_long_past_is_split_over_messages_and_steps_and_others_do_not_wait(
    small_messages: None,
) -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    for salt in range(2):
        harness.admit(prompt_of(4, salt), 200)
    harness.steps(2)
    harness.set_policy(max_decode_rows=0)
    harness.steps(95)
    # Of the two old ones each misses about a hundred rows; a step takes forty.
    harness.set_policy()
    harness.admit(prompt_of(4, 9), 100)
    asked = []
    for _ in range(8):
        sent = len(harness.peer.steps)
        harness.steps(1)
        steps = harness.peer.steps[sent:]
        for step in steps:
            assert sum(row.feature_count for row in step) <= 10
        assert sum(row.feature_count for step in steps for row in step) <= 40 + 2 * 5
        assert [any(row.draft_length for row in step) for step in steps].count(True) == 1
        asked.append(sum(row.draft_length > 0 for step in steps for row in step))
    assert asked[0] == 1
    assert asked[-1] == 3
    harness.finish()


def test_a_row_larger_than_a_message_is_cut_and_asks_in_the_last_one(small_messages: None) -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    harness.admit(prompt_of(9), 200)
    harness.steps(1)
    harness.set_policy(draft_length=0)
    # The first of them verifies the draft that was asked for before.
    harness.steps(18)
    sent = len(harness.peer.steps)
    harness.set_policy()
    harness.loop._ask()
    rows = [row for step in harness.peer.steps[sent:] for row in step]
    assert [row.feature_count for row in rows] == [10, 10, 2]
    assert [row.commit_count for row in rows] == [22, 0, 0]
    assert [row.draft_length for row in rows] == [0, 0, DRAFT_LENGTH]
    harness.finish()


def test_while_the_link_is_congested_only_a_few_rows_go_out() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    harness.admit(prompt_of(3), 110)
    harness.steps(3)
    harness.num_unsent = 1000
    harness.admit(prompt_of(60, 2), 110)
    sent = len(harness.peer.steps)
    harness.steps(6)
    rows = [row for step in harness.peer.steps[sent:] for row in step]
    assert rows and all(row.feature_count <= DRAFT_LENGTH + 1 for row in rows)
    harness.num_unsent = 0
    harness.steps(1)
    assert len([row for row in harness.peer.steps[-1] if row.draft_length]) == 2
    harness.finish()


def test_a_draft_that_asks_for_everything_again_gets_tokens_and_features() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    for salt in range(3):
        harness.admit(prompt_of(20, salt), 70)
    harness.steps(6)
    assert harness.peer.num_opens == 3
    harness.peer.forgets = True
    harness.steps(3)
    assert harness.peer.num_opens == 6
    assert all(held.first_position == 0 for held in harness.peer.held.values())
    harness.finish()


def test_a_prompt_that_the_draft_forgot_half_way_is_told_again_once_it_decodes() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    harness.admit(prompt_of(3), 60)
    harness.steps(2)
    harness.admit(prompt_of(60, 5), 20)
    harness.steps(2)
    (key,) = [key for key, held in harness.peer.held.items() if len(held.tokens) == 60]
    del harness.peer.held[key]
    harness.mailbox.deliver(
        draft_pb2.LinkResponse(
            resync=draft_pb2.Resync(
                slots=np.array([key[0]], "<u4").tobytes(),
                generations=np.array([key[1]], "<u4").tobytes(),
                held_lengths=bytes(4),
            )
        )
    )
    sent = len(harness.peer.steps)
    harness.steps(4)
    rows = [row for step in harness.peer.steps[sent:] for row in step if row.base_length >= 60]
    # The whole prompt's at once, and then what its first draft brought.
    assert [row.feature_count for row in rows][:1] == [60]
    assert harness.peer.num_opens == 3
    harness.finish()


def test_a_draft_service_that_restarts_finds_the_features_of_what_runs() -> None:
    harness = Harness()
    tap = harness.make_tap()
    harness.link(tap)
    for salt in range(3):
        harness.admit(prompt_of(20, salt), 100)
    harness.steps(4)
    harness.mailbox.close_stream(fell_silent=False)
    harness.steps(5)
    assert harness.drafts.tap() is tap
    harness.link(tap)
    harness.steps(2)
    assert {held.first_position for held in harness.peer.held.values()} == {0}
    assert len(harness.peer.held) == 3
    harness.finish()


def test_a_projection_that_comes_late_gives_features_from_there_on() -> None:
    harness = Harness()
    harness.admit(prompt_of(20), 100)
    harness.steps(6)
    assert harness.drafts.tap() is None
    cached = harness.scheduler.running[0].cached_length
    harness.link(harness.make_tap())
    harness.steps(3)
    (held,) = harness.peer.held.values()
    assert held.first_position == cached
    assert held.features
    harness.finish()


def test_another_projection_makes_everything_before_it_invalid() -> None:
    harness = Harness()
    harness.link(harness.make_tap())
    harness.admit(prompt_of(20), 200)
    harness.steps(4)
    cached = harness.scheduler.running[0].cached_length
    harness.link(harness.make_tap(seed=1))
    harness.steps(3)
    (held,) = harness.peer.held.values()
    assert held.first_position >= cached
    # And one that needs none in between: what was computed then has no features.
    harness.link(None)
    harness.peer.held = {}
    harness.peer._step = lambda step: None  # type: ignore[method-assign]
    harness.steps(2)
    assert harness.drafts.tap() is None
    cached = harness.scheduler.running[0].cached_length
    harness.link(harness.make_tap())
    harness.steps(2)
    (held,) = harness.peer.held.values()
    assert held.first_position >= cached
    harness.finish()


@pytest.mark.parametrize("runs_ahead", [False, True], ids=["in turn", "a step ahead"])
def test_features_are_right_through_preemptions_reused_blocks_and_late_adoption(
    runs_ahead: bool,
) -> None:
    random.seed(11)
    harness = Harness(num_blocks=14, runs_ahead=runs_ahead)
    for round_ in range(30):
        if round_ in (6, 18):
            rows_under_way = [len(step.sequences) for step in harness.late.running]
            harness.link(harness.make_tap(seed=0 if round_ == 6 else 2))
            harness.peer.asks_before_features = sum(rows_under_way)
        prompt = prompt_of(random.randrange(1, 40), round_)
        harness.admit(prompt, random.randrange(1, 30), Sampling(temperature=0.7, seed=round_))
        harness.set_policy(max_decode_rows=random.choice([None, 1, 2, 3]))
        harness.steps(random.randrange(1, 4))
    harness.finish()
    assert harness.scheduler.preemptions > 0
    assert harness.statistics.feature_rows["inline"] > 200
    assert harness.statistics.accepted_tokens > 50
    assert (len(harness.late.rows_ahead) >= 10) == runs_ahead


def test_with_a_ring_the_rows_lie_in_it_and_the_messages_hold_their_places(
    ring: tuple[SharedRing, SharedRing],
) -> None:
    reader, writer = ring
    harness = Harness()
    harness.peer.reader = reader
    harness.link(harness.make_tap(), writer)
    for salt in range(3):
        harness.admit(prompt_of(30, salt), 60)
    harness.finish()
    assert harness.statistics.feature_rows["shared_memory"] > 3 * 60
    assert harness.statistics.feature_rows["inline"] == 0
    assert not any(message.inline_features for message in harness.peer.messages)
    # More than a message may take of this ring was sent in pieces.
    assert max(sum(r.feature_count for r in step) for step in harness.peer.steps) == 10
    harness.mailbox.close_stream(fell_silent=False)
    assert harness.drafts.unavailable(patience_seconds=0) == "link_down"
    with pytest.raises(ValueError, match="closed"):
        writer.write(b"x")
