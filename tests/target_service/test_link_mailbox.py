"""What crosses between the link's event loop and the engine's thread, and what the circuit makes
of it.
"""

import threading
import time

import numpy as np
import pytest

from outrider.serving.columns import MalformedColumn
from outrider.v1 import draft_pb2, target_pb2
from target_service.circuit_breaker import MAX_CONSECUTIVE_LATE, TIMELY_TO_CLOSE, Circuit
from target_service.codec import decode_draft, decode_rows
from target_service.link_mailbox import LinkMailbox, LinkView
from target_service.policy import policy_from
from target_service.statistics import Statistics


def view(epoch: int = 1, boot_id: int = 7) -> LinkView:
    return LinkView(
        stream_epoch=epoch, draft_boot_id=boot_id, max_draft_length=4, max_sequence_length=100
    )


def draft(step_id: int) -> draft_pb2.LinkResponse:
    return draft_pb2.LinkResponse(draft=draft_pb2.Draft(step_id=step_id))


def mailbox() -> LinkMailbox:
    box = LinkMailbox(Statistics(4))
    box.open_stream(view())
    return box


def test_an_answer_is_judged_by_the_wait_of_its_own_step() -> None:
    box = mailbox()
    for step_id in range(1, 10):
        box.asked(step_id, late_after_seconds=5.0)
        time.sleep(0.002)
        box.deliver(draft(step_id))
    assert box.circuit()[0] == Circuit.CLOSED
    for step_id in range(10, 10 + MAX_CONSECUTIVE_LATE):
        box.asked(step_id, late_after_seconds=0.001)
        time.sleep(0.002)
        box.deliver(draft(step_id))
    assert box.circuit()[0] == Circuit.OPEN


def test_what_was_unanswered_when_the_circuit_opened_does_not_count_against_the_trial() -> None:
    box = mailbox()
    for step_id in range(1, 8):
        box.asked(step_id, late_after_seconds=0.0)
        time.sleep(0.001)
    assert box.circuit()[0] == Circuit.OPEN
    time.sleep(0.55)
    assert box.circuit()[0] == Circuit.HALF_OPEN
    for step_id in range(10, 10 + TIMELY_TO_CLOSE):
        box.asked(step_id, late_after_seconds=5.0)
        box.deliver(draft(step_id))
    assert box.circuit()[0] == Circuit.CLOSED


def test_a_draft_that_nobody_asked_for_or_that_comes_twice_is_dropped_unread() -> None:
    statistics = Statistics(4)
    box = LinkMailbox(statistics)
    box.open_stream(view())
    box.asked(1, late_after_seconds=5.0)
    for _ in range(3):
        box.deliver(draft(1))
    for _ in range(1000):
        box.deliver(draft(99))
    assert len(box.take_received()) == 1
    assert statistics.draft_rows_dropped["not_asked"] == 1002


def test_resyncs_that_nobody_takes_are_bounded() -> None:
    box = mailbox()
    for _ in range(1000):
        box.deliver(draft_pb2.LinkResponse(resync=draft_pb2.Resync()))
    assert len(box.take_received()) <= 64


def test_a_stream_that_is_gone_ends_the_wait_for_it_at_once() -> None:
    box = mailbox()
    box.asked(1, late_after_seconds=5.0)
    threading.Timer(0.05, box.close_stream, kwargs={"fell_silent": False}).start()
    started = time.monotonic()
    assert not box.wait_for(1, 1, 5.0)
    # Asked on a stream that is gone before the wait begins.
    assert not box.wait_for(1, 1, 5.0)
    assert time.monotonic() - started < 1


def test_a_process_that_fell_silent_is_on_trial_when_it_is_back_and_a_new_one_is_not() -> None:
    box = mailbox()
    box.close_stream(fell_silent=True)
    box.open_stream(view(epoch=2))
    assert box.circuit()[0] == Circuit.OPEN
    box.open_stream(view(epoch=3, boot_id=8))
    assert box.circuit()[0] == Circuit.CLOSED


def test_messages_with_more_rows_than_there_are_slots_are_refused_before_they_are_read() -> None:
    many = np.zeros(9, "<u4").tobytes()
    with pytest.raises(MalformedColumn, match="at most 8 rows"):
        decode_draft(draft_pb2.Draft(slots=many), max_rows=8)
    with pytest.raises(MalformedColumn, match="at most 8 rows"):
        decode_rows(draft_pb2.Resync(slots=many), max_rows=8)
    one = np.zeros(1, "<u4").tobytes()
    with pytest.raises(MalformedColumn, match="token_ids"):
        decode_draft(
            draft_pb2.Draft(
                slots=one, generations=one, base_lengths=one, prefix_hashes=bytes(8),
                token_counts=b"\x01", token_ids=bytes(4_000_000),
            ),
            max_rows=8,
        )  # fmt: skip


def test_a_policy_is_kept_within_the_targets_own_draft_length() -> None:
    policy = policy_from(
        target_pb2.SpeculationPolicy(
            rules=[
                target_pb2.DraftLengthRule(max_decode_rows=8, draft_length=300),
                target_pb2.DraftLengthRule(max_decode_rows=2, draft_length=3),
            ]
        ),
        max_draft_length=5,
    )
    assert [policy.draft_length(rows) for rows in (1, 2, 3, 8, 9)] == [3, 3, 5, 5, 0]
