import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.config import GatewayConfig
from gateway.connection import speculation_for
from gateway.controller import ASSUMED_ACCEPTANCE_RATE, Controller
from gateway.model import ServedModel
from gateway.speculation import (
    EVERY_ROW_COUNT,
    StepCost,
    fixed_speculation,
    no_speculation,
    seconds_of,
    threshold_bound,
)
from gateway.speculation_in_force import SpeculationInForce
from gateway.step import SequenceStep
from gateway.step_times import row_bounds
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


def auto(costs: list[StepCost], *, running: int = 64, longest: int = 5):
    return Controller(
        step_costs=costs,
        max_draft_length=longest,
        max_running_sequences=running,
        max_decode_rows=None,
    ).policy


def test_auto_begins_with_long_drafts_for_few_rows_and_less_for_many():
    policy = auto(CPU_COSTS)
    assert length_at(policy, 1) == 5
    assert length_at(policy, 64) < length_at(policy, 1)


def test_auto_does_not_begin_to_draft_where_every_row_costs_as_much_as_the_first():
    policy = auto([StepCost(rows=rows, seconds=0.01 * rows) for rows in (1, 8, 64)])
    assert policy.rules == ()


@given(
    seconds=st.lists(st.floats(0.001, 1), min_size=1, max_size=6),
    longest=st.integers(1, 8),
    running=st.integers(1, 40),
)
def test_auto_begins_nowhere_worse_than_any_other_length(seconds, longest, running):
    costs = [StepCost(rows=8 * 2**index, seconds=value) for index, value in enumerate(seconds)]
    policy = auto(costs, running=running, longest=longest)
    assert list(policy.rules) == sorted(policy.rules)

    def speed(rows: int, length: int) -> float:
        expected = sum(ASSUMED_ACCEPTANCE_RATE**position for position in range(length + 1))
        return expected / seconds_of(costs, rows * (length + 1))

    for rows in row_bounds(running):
        chosen = speed(rows, length_at(policy, rows))
        assert all(chosen >= speed(rows, other) * (1 - 1e-9) for other in range(longest + 1))


@pytest.mark.parametrize("most", [1, 5, 64, 65, 256, 300, 4096])
def test_buckets_of_rows_ascend_to_the_most(most: int):
    bounds = row_bounds(most)
    assert bounds[0] == 1 and bounds == sorted(set(bounds))
    assert bounds[-1] >= most and (len(bounds) == 1 or bounds[-2] < most)


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
    policy, controller = speculation_for(config, served_model())
    assert controller is None
    assert policy.rules == rules
    assert policy.reasons


def test_the_threshold_holds_in_every_mode():
    for mode in ("auto", "fixed", "off"):
        config = GatewayConfig(
            draft_address="127.0.0.1:1", speculation=mode, speculative_disable_batch_threshold=3
        )
        assert speculation_for(config, served_model())[0].max_decode_rows == 3


def test_auto_learns_and_without_measured_costs_is_fixed():
    config = GatewayConfig(draft_address="127.0.0.1:1")
    policy, controller = speculation_for(config, served_model())
    assert controller is not None and policy == controller.policy
    model = served_model()
    del model.info.step_costs[:]
    policy, controller = speculation_for(config, model)
    assert controller is None
    assert policy.rules == ((EVERY_ROW_COUNT, 5),)


def report(draft_length: int, prefill_tokens: int = 0) -> target_pb2.StepReport:
    return target_pb2.StepReport(
        decode_rows=1,
        draft_length=draft_length,
        step_seconds=0.03 + 0.004 * draft_length,
        prefill_tokens=prefill_tokens,
    )


def step(accepted: int) -> SequenceStep:
    return SequenceStep(
        token_ids=range(accepted + 1), drafted_length=5, accepted_length=accepted, finish_reason=0
    )


def test_what_steps_report_changes_the_table_and_an_override_stands_until_it_ends():
    policy, controller = speculation_for(GatewayConfig(draft_address="127.0.0.1:1"), served_model())
    sent: list[target_pb2.SpeculationPolicy] = []
    speculation = SpeculationInForce(policy, controller, sent.append)
    for _ in range(200):
        length = length_at(speculation.policy, 1)
        speculation.observe(report(length), [(1, step(0))])
    assert length_at(speculation.policy, 1) == 0
    assert sent and sent[-1] == speculation.policy.to_message()
    override = no_speculation("because", None)
    speculation.override(override)
    assert sent[-1] == override.to_message() and speculation.policy == override
    count = len(sent)
    for _ in range(300):
        speculation.observe(report(5), [(1, step(5))])
    assert len(sent) == count
    speculation.end_override()
    assert len(sent) == count + 1 and length_at(speculation.policy, 1) > 0
    speculation.end_override()
    assert len(sent) == count + 1


def test_a_step_with_a_prompt_in_it_says_nothing_of_drafts():
    policy, controller = speculation_for(GatewayConfig(draft_address="127.0.0.1:1"), served_model())
    speculation = SpeculationInForce(policy, controller, lambda message: None)
    before = speculation.estimates()[1]
    for _ in range(50):
        speculation.observe(report(5, prefill_tokens=64), [(1, step(0)), (2, step(0))])
    assert speculation.estimates()[1] == before
