import asyncio
import threading
import time

import pytest

from outrider.serving.errors import ConfigurationError, NotServing
from outrider.serving.faults import FaultInjector, parse_faults
from outrider.serving.lifecycle import Lifecycle, Timeouts
from outrider.serving.stages import ENGINE_STAGES, state_name
from outrider.v1 import status_pb2


def make(faults: str = "", stage_seconds: float = 60, activity_seconds: float = 60) -> Lifecycle:
    return Lifecycle(
        service="target",
        stages=ENGINE_STAGES,
        configuration={"port": "1"},
        faults=FaultInjector("target", parse_faults("target", faults)),
        timeouts=Timeouts(stage_seconds=stage_seconds, activity_seconds=activity_seconds),
    )


def boot(lifecycle: Lifecycle) -> None:
    for stage in ENGINE_STAGES:
        if stage == "graphs":
            lifecycle.skip(stage, "no graphs on cpu")
        else:
            lifecycle.enter(stage)
    lifecycle.serve("engine")


def stages(lifecycle: Lifecycle) -> dict[str, str]:
    return {
        stage.name: status_pb2.StageState.Name(stage.state).removeprefix("STAGE_STATE_")
        for stage in lifecycle.status().stages
    }


def test_a_boot_passes_through_its_stages_and_then_serves_what_was_booted() -> None:
    lifecycle = make()
    with pytest.raises(NotServing, match="LOADING in stage config"):
        lifecycle.ready()
    boot(lifecycle)
    assert lifecycle.ready() == "engine"
    assert stages(lifecycle) == {
        "config": "DONE",
        "weights": "DONE",
        "kv_cache": "DONE",
        "attention": "DONE",
        "graphs": "SKIPPED",
        "first_decode": "DONE",
    }


@pytest.mark.parametrize("stage", ENGINE_STAGES)
def test_an_exception_in_any_stage_fails_the_service_by_that_stages_name(stage: str) -> None:
    lifecycle = make(f"target:{stage}:raise")
    seen = []
    lifecycle.guard(lambda: boot(lifecycle))
    seen.append(state_name(lifecycle.state))
    status = lifecycle.status()
    assert seen == ["FAILED"]
    assert status.failure.stage == stage
    assert f"injected fault at target:{stage}" in status.failure.reason
    assert stages(lifecycle)[stage] == "FAILED"
    with pytest.raises(NotServing, match=f"FAILED in stage {stage}"):
        lifecycle.ready()


def test_a_failed_service_never_serves_again() -> None:
    lifecycle = make()
    lifecycle.fail("weights", "broken")
    lifecycle.serve("engine")
    assert state_name(lifecycle.state) == "FAILED"
    lifecycle.fail("graphs", "later")
    assert lifecycle.status().failure.reason == "broken"


def test_an_exception_in_an_activity_is_put_down_to_the_innermost_one() -> None:
    lifecycle = make("target:verify:raise")
    boot(lifecycle)

    def step() -> None:
        with lifecycle.activity("step"), lifecycle.activity("verify"):
            pass

    lifecycle.guard(step)
    assert lifecycle.status().failure.stage == "verify"


def test_an_activity_is_listed_with_its_first_run() -> None:
    lifecycle = make()
    boot(lifecycle)
    with lifecycle.activity("step"):
        assert stages(lifecycle)["step"] == "RUNNING"
        assert lifecycle.current_point() == "step"
    assert stages(lifecycle)["step"] == "DONE"


def test_a_fault_fires_from_the_entry_it_names() -> None:
    lifecycle = make("target:step:raise@3")
    boot(lifecycle)

    def steps() -> None:
        for _ in range(5):
            with lifecycle.activity("step"):
                counted.append(1)

    counted: list[int] = []
    lifecycle.guard(steps)
    assert len(counted) == 2
    assert lifecycle.status().failure.stage == "step"


def test_a_stage_that_hangs_is_failed_by_the_watchdog() -> None:
    lifecycle = make(stage_seconds=0.05)
    lifecycle.enter("weights")
    lifecycle.note("layer 3 of 30")
    time.sleep(0.06)
    lifecycle.check_timeouts()
    failure = lifecycle.status().failure
    assert failure.stage == "weights"
    assert "--startup-timeout 0.05" in failure.reason
    assert "layer 3 of 30" in failure.reason


def test_a_step_that_hangs_is_failed_by_the_watchdog_and_an_idle_service_is_not() -> None:
    lifecycle = make(activity_seconds=0.05)
    boot(lifecycle)
    time.sleep(0.06)
    lifecycle.check_timeouts()
    assert lifecycle.is_serving
    release = threading.Event()

    def hang() -> None:
        with lifecycle.activity("step"):
            release.wait()

    thread = threading.Thread(target=hang)
    thread.start()
    time.sleep(0.06)
    lifecycle.check_timeouts()
    release.set()
    thread.join()
    assert lifecycle.status().failure.stage == "step"


def test_every_watcher_sees_the_last_state_and_one_that_leaves_costs_the_others_nothing() -> None:
    lifecycle = make()

    async def watch(num_changes: int) -> list[str]:
        seen = []
        for _ in range(num_changes):
            revision = lifecycle.revision
            seen.append(state_name(lifecycle.state))
            await lifecycle.changed_since(revision)
        return seen

    async def main() -> None:
        leaver = asyncio.create_task(watch(100))
        stayer = asyncio.create_task(watch(2))
        await asyncio.sleep(0)
        leaver.cancel()
        await asyncio.sleep(0)
        thread = threading.Thread(target=lifecycle.enter, args=("weights",))
        thread.start()
        thread.join()
        await asyncio.sleep(0.01)
        lifecycle.fail("weights", "broken")
        async with asyncio.timeout(1):
            assert await stayer == ["LOADING", "LOADING"]
        assert state_name(lifecycle.state) == "FAILED"

    asyncio.run(main())


def test_a_failure_stays_a_failure_to_the_end() -> None:
    lifecycle = make()
    boot(lifecycle)
    lifecycle.fail("step", "broken")
    lifecycle.drain()
    assert state_name(lifecycle.state) == "FAILED"
    assert lifecycle.words() == "FAILED in stage step: broken"


def test_an_engine_that_dies_while_draining_is_a_failure() -> None:
    lifecycle = make("target:step:raise")
    boot(lifecycle)
    lifecycle.drain()
    assert lifecycle.is_draining

    def step() -> None:
        with lifecycle.activity("step"):
            pass

    lifecycle.guard(step)
    assert not lifecycle.is_draining
    assert lifecycle.status().failure.stage == "step"


def test_a_stage_that_waits_for_something_bounded_elsewhere_is_not_failed() -> None:
    lifecycle = make(stage_seconds=0.1)
    lifecycle.enter("weights")
    for _ in range(5):
        time.sleep(0.04)
        lifecycle.touch()
        lifecycle.check_timeouts()
    assert state_name(lifecycle.state) == "LOADING"
    time.sleep(0.12)
    lifecycle.check_timeouts()
    assert lifecycle.status().failure.stage == "weights"


def test_a_serving_process_without_use_is_not_healthy() -> None:
    lifecycle = make()
    boot(lifecycle)
    assert lifecycle.is_healthy
    revision = lifecycle.revision
    lifecycle.set_usable(False)
    assert lifecycle.is_serving
    assert not lifecycle.is_healthy
    assert lifecycle.revision > revision
    lifecycle.set_usable(True)
    assert lifecycle.is_healthy


@pytest.mark.parametrize(
    ("error", "has_traceback"),
    [(ConfigurationError("model is '/nope'"), False), (KeyError(), True)],
)
def test_only_an_unexpected_error_is_logged_with_its_traceback(
    error: Exception, has_traceback: bool, caplog: pytest.LogCaptureFixture
) -> None:
    lifecycle = make()

    def broken() -> None:
        raise error

    lifecycle.guard(broken)
    assert any(record.exc_info for record in caplog.records) == has_traceback
    assert type(error).__name__ in lifecycle.status().failure.reason
