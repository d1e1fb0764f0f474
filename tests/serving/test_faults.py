import time

import pytest

from outrider.serving.errors import ConfigurationError
from outrider.serving.faults import FaultInjector, InjectedFault, parse_faults


def test_a_service_takes_only_its_own_faults() -> None:
    text = "target:graphs:raise, draft:propose:delay=0.5"
    assert [fault.point for fault in parse_faults("target", text)] == ["graphs"]
    (fault,) = parse_faults("draft", text)
    assert (fault.action, fault.delay_seconds, fault.first_entry) == ("delay", 0.5, 1)
    assert parse_faults("gateway", text) == ()


@pytest.mark.parametrize(
    "text",
    [
        "target",
        "target:graphs",
        "targets:graphs:raise",
        "target:tokenizer:raise",
        "gateway:step:raise",
        "target:graphs:explode",
        "target:graphs:delay",
        "target:graphs:delay=soon",
        "target:graphs:raise=1",
        "target:graphs:raise@x",
        "target:graphs:raise@-1",
        "target:graphs:delay=-1",
        "target:graphs:delay=nan",
    ],
)
def test_a_fault_that_nothing_has_is_an_error(text: str) -> None:
    with pytest.raises(ConfigurationError, match="inject_fault"):
        parse_faults("target", text)


def test_raise_and_delay_do_what_they_say_at_their_point_only() -> None:
    injector = FaultInjector(
        "target", parse_faults("target", "target:step:delay=0.05,target:verify:raise")
    )
    started = time.monotonic()
    injector.fire("step")
    assert time.monotonic() - started >= 0.05
    injector.fire("weights")
    with pytest.raises(InjectedFault, match="target:verify"):
        injector.fire("verify")
