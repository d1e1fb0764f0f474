"""What is known of one service, in words: its state, stage and reason, also once it is gone."""

from dataclasses import dataclass

from outrider.serving.stages import state_name
from outrider.v1 import status_pb2

# Not states of a service, but of what the gateway knows of it.
UNREACHABLE = "UNREACHABLE"
GONE = "GONE"
NO_ANSWER = "NO_ANSWER"
VIEW_STATES = (
    *(state_name(state) for state in status_pb2.ServiceState.values() if state),
    UNREACHABLE,
    GONE,
    NO_ANSWER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceView:
    """One line about a service. `reason` is empty where there is nothing to explain."""

    service: str
    state: str
    stage: str
    reason: str

    @property
    def is_serving(self) -> bool:
        """It answers and says SERVING."""
        return self.state == "SERVING"

    def words(self) -> str:
        """`draft: FAILED in stage propose: ...`."""
        stage = f" in stage {self.stage}" if self.stage else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.service}: {self.state}{stage}{reason}"


def stage_of(status: status_pb2.ServiceStatus) -> tuple[str, str]:
    """The stage that a status is about, and why: where it failed, or what runs."""
    if status.HasField("failure"):
        return status.failure.stage, status.failure.reason
    running = [stage for stage in status.stages if stage.state == status_pb2.STAGE_STATE_RUNNING]
    return (running[-1].name, running[-1].detail) if running else ("", "")


def live_view(service: str, status: status_pb2.ServiceStatus) -> ServiceView:
    """A service that answers."""
    stage, reason = stage_of(status)
    return ServiceView(service=service, state=state_name(status.state), stage=stage, reason=reason)


def lost_view(
    service: str, state: str, why: str, last_status: status_pb2.ServiceStatus | None
) -> ServiceView:
    """A service that does not answer: why, and what it said last."""
    if last_status is None:
        return ServiceView(service=service, state=state, stage="", reason=why)
    last = live_view(service, last_status)
    last_words = last.words().removeprefix(f"{service}: ")
    return ServiceView(
        service=service,
        state=state,
        stage=last.stage,
        reason=f"{state.lower().replace('_', ' ')}; last known: {last_words}; {why}",
    )
