import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import GatewayConfig
from gateway.connection import policy_for
from gateway.model import ServedModel
from gateway.speculation import (
    EVERY_ROW_COUNT,
    StepCost,
    expected_emitted_tokens,
    fixed_speculation,
    no_speculation,
    seconds_of,
    static_speculation,
    threshold_bound,
)
from outrider.v1 import target_pb2

CPU_COSTS = [
    StepCost(rows=8, seconds=0.030),
    StepCost(rows=16, seconds=0.038),
    StepCost(rows=32, seconds=0.070),
    StepCost(rows=64, seconds=0.140),
]


def length_at(policy, rows: int) -> int:
    """The target's rule for a step's row count."""
    return next((length for most, length in policy.rules if rows <= most), 0)


def served_model(max_draft_length: int = 5) -> ServedModel:
    info = target_pb2.ModelInfo(
        step_costs=[target_pb2.StepCost(rows=cost.rows, seconds=cost.seconds) for cost in CPU_COSTS]
    )
    return ServedModel(
        name="m",
        vocab_size=10,
        max_sequence_length=100,
        max_running_sequences=32,
        max_draft_length=max_draft_length,
        fingerprint="f",
        info=info,
    )


def test_threshold_0_sends_no_bound_at_all():
    assert threshold_bound(0) is None
    message = fixed_speculation(4, threshold_bound(0)).to_message()
    assert not message.HasField("max_decode_rows")


@pytest.mark.parametrize("threshold", [1, 2, 8, 2**32 - 1])
def test_threshold_n_is_sent_as_exactly_n(threshold: int):
    message = fixed_speculation(4, threshold_bound(threshold)).to_message()
    assert message.HasField("max_decode_rows")
    assert message.max_decode_rows == threshold


def test_off_has_no_rules_and_so_draft_length_0_everywhere():
    policy = no_speculation("because", None)
    assert policy.to_message() == target_pb2.SpeculationPolicy()
    assert length_at(policy, 1) == length_at(policy, 1000) == 0


def test_fixed_asks_for_the_same_length_at_every_row_count():
    policy = fixed_speculation(4, None)
    assert [length_at(policy, rows) for rows in (1, 7, 64, EVERY_ROW_COUNT)] == [4] * 4


def test_fixed_with_length_0_is_no_speculation():
    assert fixed_speculation(0, None).rules == ()


def test_auto_drafts_long_for_few_rows_and_less_for_many():
    policy = static_speculation(
        step_costs=CPU_COSTS, max_draft_length=5, max_running_sequences=64, max_decode_rows=None
    )
    assert length_at(policy, 1) == 5
    assert length_at(policy, 64) < length_at(policy, 1)


def test_auto_does_not_draft_where_every_row_costs_as_much_as_the_first():
    costs = [StepCost(rows=rows, seconds=0.01 * rows) for rows in (1, 8, 64)]
    policy = static_speculation(
        step_costs=costs, max_draft_length=5, max_running_sequences=16, max_decode_rows=None
    )
    assert policy.rules == ()


def test_auto_without_measured_costs_is_fixed():
    policy = static_speculation(
        step_costs=[], max_draft_length=3, max_running_sequences=16, max_decode_rows=None
    )
    assert policy.rules == ((EVERY_ROW_COUNT, 3),)


@given(
    seconds=st.lists(st.floats(0.001, 1), min_size=1, max_size=6),
    max_draft_length=st.integers(0, 8),
    running=st.integers(1, 40),
)
def test_auto_is_nowhere_worse_than_any_other_length(seconds, max_draft_length, running):
    costs = [StepCost(rows=8 * 2**index, seconds=value) for index, value in enumerate(seconds)]
    policy = static_speculation(
        step_costs=costs,
        max_draft_length=max_draft_length,
        max_running_sequences=running,
        max_decode_rows=None,
    )
    assert list(policy.rules) == sorted(policy.rules)

    def speed(rows: int, length: int) -> float:
        return expected_emitted_tokens(length) / seconds_of(costs, rows * (length + 1))

    for rows in range(1, running + 1):
        chosen = speed(rows, length_at(policy, rows))
        assert all(chosen >= speed(rows, other) for other in range(max_draft_length + 1))


@given(st.integers(0, 20))
def test_expected_tokens_are_the_geometric_sum(length: int):
    assert expected_emitted_tokens(length) == pytest.approx(sum(0.4**i for i in range(length + 1)))


@pytest.mark.parametrize(
    ("options", "rules"),
    [
        ({"speculation": "off"}, ()),
        ({"speculation": "fixed"}, ((EVERY_ROW_COUNT, 5),)),
        ({"speculation": "fixed", "max_draft_length": 2}, ((EVERY_ROW_COUNT, 2),)),
        ({"speculation": "fixed", "max_draft_length": 9}, ((EVERY_ROW_COUNT, 5),)),
        ({"speculation": "fixed", "draft_address": ""}, ()),
    ],
)
def test_the_policy_follows_the_configuration(options, rules):
    config = GatewayConfig(**{"draft_address": "127.0.0.1:1", **options})
    policy = policy_for(config, served_model())
    assert policy.rules == rules
    assert policy.reasons


def test_the_threshold_holds_in_every_mode():
    for mode in ("auto", "fixed", "off"):
        config = GatewayConfig(
            draft_address="127.0.0.1:1", speculation=mode, speculative_disable_batch_threshold=3
        )
        assert policy_for(config, served_model()).max_decode_rows == 3
