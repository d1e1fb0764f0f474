"""Random schedules of lost, repeated, late, foreign and corrupted messages, cut streams and
restarts: tokens are those of plain decoding, drafts are used where they belong, nothing is kept.

A schedule that fails is shrunk and printed by hypothesis. With a check planted away, one is found.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample
from link_schedule import (
    Admit,
    Run,
    Schedule,
    schedules,
)
from link_world import LinkWorld, Violation

from draft_service.link_sessions import LinkSessions
from draft_service.sessions import Commit, Session
from target_service.codec import FeatureRows
from target_service.feature_feed import FeatureFeed
from target_service.linked_drafts import LinkedDrafts

NUM_SCHEDULES = 100
MANY_SCHEDULES = 2000
# Within so many, a planted bug is found.
SCHEDULES_PER_BUG = 400


def run(schedule: Schedule, *, heals: bool = True) -> LinkWorld:
    with pytest.MonkeyPatch.context() as monkeypatch:
        world = LinkWorld(monkeypatch, schedule)
        world.run(heals=heals)
        return world


def test_undisturbed_every_step_but_the_prompts_has_drafts() -> None:
    world = run(Schedule(64, False, False, (Admit(0, 0, 30, 3), Run(3))))
    statistics = world.target.statistics
    assert not +statistics.draft_rows_dropped
    assert statistics.accepted_tokens == statistics.draft_tokens
    # Three sequences and the three that follow: of each, the first token comes with the prompt.
    assert statistics.emitted_tokens == 6 * 30
    assert statistics.drafts == 6 * 29 - statistics.accepted_tokens


# The same schedules every time: what fails here fails everywhere.
@settings(
    max_examples=NUM_SCHEDULES, derandomize=True, deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(schedule=schedules())
def test_no_schedule_changes_a_token_or_leaves_anything_behind(schedule: Schedule) -> None:
    run(schedule)


@pytest.mark.full
@settings(
    max_examples=MANY_SCHEDULES, deadline=None, print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)  # fmt: skip
@given(schedule=schedules())
def test_none_of_many_schedules_does_either(schedule: Schedule) -> None:
    run(schedule)


def accept_stale_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the draft: whatever the slot holds is taken for the row's."""
    monkeypatch.setattr(
        LinkSessions, "find", lambda self, slot, generation: self._sessions.get(slot)
    )


def use_drafts_of_stale_generations(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the target: a draft for a slot's last holder is taken for its present one's."""
    take_row = LinkedDrafts._take_row

    def take_any(self, row, live, drafts):  # type: ignore[no-untyped-def]
        if self._slots.holder(row.stamp.slot) is not None:
            generation = self._slots.generation(row.stamp.slot)
            row = replace(row, stamp=replace(row.stamp, generation=generation))
        take_row(self, row, live, drafts)

    monkeypatch.setattr(LinkedDrafts, "_take_row", take_any)


def commit_without_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the draft: tokens are taken for what their hash says, whatever they are."""
    commit = Session.commit

    def commit_any(self, *, base_length, prefix_hash, count, token_ids):  # type: ignore[no-untyped-def]
        held = self.length
        outcome = commit(
            self, base_length=base_length, prefix_hash=prefix_hash, count=count,
            token_ids=token_ids,
        )  # fmt: skip
        if outcome is Commit.MISMATCH and base_length > held >= base_length - count:
            new = token_ids[count - (base_length - held) :]
            self.token_ids.extend(new)
            self._hashes.extend([prefix_hash] * len(new))
            return Commit.APPLIED
        return outcome

    monkeypatch.setattr(Session, "commit", commit_any)


def use_drafts_without_the_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the target: a draft row of the right slot and length is one of the right text."""
    take_row = LinkedDrafts._take_row

    def take_any(self, row, live, drafts):  # type: ignore[no-untyped-def]
        holder = self._slots.holder(row.stamp.slot)
        if holder is not None:
            row = replace(row, stamp=replace(row.stamp, prefix_hash=holder.prefix_hash))
        take_row(self, row, live, drafts)

    monkeypatch.setattr(LinkedDrafts, "_take_row", take_any)


def commit_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the draft: a Step that comes again counts again."""
    commit = Session.commit

    def commit_again(self, *, base_length, prefix_hash, count, token_ids):  # type: ignore[no-untyped-def]
        outcome = commit(
            self, base_length=base_length, prefix_hash=prefix_hash, count=count,
            token_ids=token_ids,
        )  # fmt: skip
        if outcome is Commit.DUPLICATE:
            self.token_ids.extend(token_ids)
            self._hashes.extend([prefix_hash] * len(token_ids))
        return outcome

    monkeypatch.setattr(Session, "commit", commit_again)


def shift_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the target: each feature goes out as that of the position before it."""
    take = FeatureFeed.take

    def take_shifted(self, sequence, limit=None):  # type: ignore[no-untyped-def]
        taken = take(self, sequence, limit)
        if taken is None or not taken.first_position:
            return taken
        return FeatureRows(first_position=taken.first_position - 1, rows=taken.rows)

    monkeypatch.setattr(FeatureFeed, "take", take_shifted)


def forget_to_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the draft: sequences of a stream outlive it."""
    monkeypatch.setattr(LinkSessions, "take_all", lambda self: [])


@pytest.mark.parametrize(
    "plant",
    [
        accept_stale_generations,
        pytest.param(use_drafts_of_stale_generations, marks=pytest.mark.full),
        commit_without_the_hash,
        pytest.param(use_drafts_without_the_hash, marks=pytest.mark.full),
        commit_twice,
        shift_features,
        forget_to_release,
    ],
)
def test_a_planted_bug_is_found_by_some_schedule(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    def fails(schedule: Schedule) -> bool:
        try:
            run(schedule, heals=False)
        except (Violation, AssertionError):
            return True
        return False

    try:
        found = find(
            schedules(restarts=False),
            fails,
            settings=settings(
                max_examples=SCHEDULES_PER_BUG, derandomize=True, deadline=None, database=None,
                phases=[Phase.generate], suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
    except NoSuchExample:
        pytest.fail(f"{plant.__name__}: no schedule found it")
    # Without the bug, the same schedule is survived.
    monkeypatch.undo()
    run(found)
