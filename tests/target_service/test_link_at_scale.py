"""A LinkWorld's less random failures: 64 sequences at once, and features that are not theirs."""

import numpy as np
import pytest
from link_corruption import Message
from link_schedule import Admit, Run, Schedule
from link_world import Clock, LinkWorld, Sizes

from target_service import told

NUM_SEQUENCES = 64
RESYNC_BURST = 4000
RESYNC_RATE = 40_000
# Virtual seconds until each of the 64 has drafts again: their 64 times some 150 tokens and features
# at the rate above, and a few steps.
BACK_WITHIN_SECONDS = 1.0


@pytest.mark.full
def test_64_sequences_are_told_again_at_a_bounded_rate_when_the_draft_restarts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(told, "RESYNC_BURST_TOKENS", RESYNC_BURST)
    monkeypatch.setattr(told, "RESYNC_TOKENS_PER_SECOND", RESYNC_RATE)
    opened: list[tuple[float, int]] = []
    clock = Clock()

    def note(message: Message) -> Message:
        if message.HasField("open"):
            tokens = sum(len(each.token_ids) // 4 for each in message.open.sequences)
            opened.append((clock.now, tokens))
        return message

    world = LinkWorld(
        monkeypatch,
        Schedule(4000, False, False, ()),
        Sizes(num_slots=NUM_SEQUENCES, max_step_rows=512, head_blocks=4000),
        bend=note,
    )
    clock = world.clock
    target = world.target
    for index in range(NUM_SEQUENCES):
        target.admit(world._wanted(Admit(index, index % 3, 400, 1), index))
    while len(target.scheduler.decoding()) < NUM_SEQUENCES:
        target.step()
    world.cut(target, 0.1)
    world.cut(world.bystander, 0.1)
    world.start_draft()
    restarted = clock.now
    opened.clear()
    without = {sequence.arrival for sequence in target.scheduler.running}
    while without:
        assert clock.now < restarted + BACK_WITHIN_SECONDS
        target.step()
        for sequence_id in list(without):
            if target.sink.outcomes[sequence_id][-1].accepted_length:
                without.discard(sequence_id)
        # Not more than the bucket gives. Features, of which there are as many, count too.
        told_so_far = 2 * sum(tokens for _, tokens in opened)
        assert told_so_far <= RESYNC_BURST + (clock.now - restarted) * RESYNC_RATE
    # Told once each, over many steps.
    assert len({moment for moment, _ in opened}) > 5
    target.cancel_all()
    world._finish()
    world._leave()


def flipped(message: Message) -> Message:
    """One bit of every row of features."""
    if not message.step.inline_features:
        return message
    bent = type(message)()
    bent.CopyFrom(message)
    rows = np.frombuffer(message.step.inline_features, "<u2").reshape(-1, 6).copy()
    rows[:, 2] ^= 1 << 6
    bent.step.inline_features = rows.tobytes()
    return bent


def test_flipped_bits_in_features_cost_drafts_and_change_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = LinkWorld(
        monkeypatch,
        Schedule(64, False, False, (Admit(0, 0, 60, 3), Run(9), Admit(3, 1, 60, 3), Run(9))),
        bend=flipped,
    )
    world.trusts_features = False
    world.run(heals=False)
    statistics = world.target.statistics
    assert statistics.drafts > 50
    assert statistics.accepted_tokens < statistics.draft_tokens / 4
    # Another target of the same draft service is not touched. The alert that follows is in
    # test_acceptance_watch.
    bystander = world.bystander.statistics
    assert bystander.accepted_tokens == bystander.draft_tokens > 10


def test_features_that_no_hidden_state_has_are_refused_and_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoiled = 0

    def without_number(message: Message) -> Message:
        nonlocal spoiled
        if not message.step.inline_features or spoiled >= 3:
            return message
        spoiled += 1
        bent = type(message)()
        bent.CopyFrom(message)
        # NaN in either format of 16 bits.
        bent.step.inline_features = b"\xff\x7f" + message.step.inline_features[2:]
        return bent

    world = LinkWorld(
        monkeypatch, Schedule(64, False, False, (Admit(0, 0, 30, 3), Run(9))), bend=without_number
    )
    # Not one of them reaches the head, whose rows are all checked.
    world.run()
    assert spoiled == 3
