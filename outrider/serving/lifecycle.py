"""The life of a service: LOADING -> CAPTURING -> WARMING -> SERVING -> DRAINING, or FAILED from
any of them.

It holds the one thing that is not there yet, the result of boot, and gives it out only while
SERVING. It does not know what is booted, nor how the status is sent.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from outrider.serving.errors import ConfigurationError, NotServing
from outrider.serving.facts import Facts
from outrider.serving.faults import FaultInjector
from outrider.serving.revision import Revision
from outrider.serving.stage_list import StageList
from outrider.serving.stages import state_name, state_of_stage
from outrider.v1 import status_pb2

logger = logging.getLogger(__name__)

Booted = TypeVar("Booted")


@dataclass(slots=True, kw_only=True)
class _Activity:
    """Something that a serving process is in the middle of."""

    name: str
    started: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long a stage or an activity may take before the service is FAILED."""

    stage_seconds: float
    activity_seconds: float


class Lifecycle(Generic[Booted]):
    """State, stages and failure of one process. Thread-safe; also the `BootReport` of the
    engine.
    """

    def __init__(
        self,
        *,
        service: str,
        stages: Sequence[str],
        configuration: Mapping[str, str],
        faults: FaultInjector,
        timeouts: Timeouts,
        expected_errors: tuple[type[Exception], ...] = (),
    ) -> None:
        self.service = service
        self._facts = Facts(service=service, configuration=dict(configuration))
        self.boot_id = self._facts.boot_id
        self._faults = faults
        self._timeouts = timeouts
        self._expected_errors: tuple[type[Exception], ...] = (
            ConfigurationError,
            *expected_errors,
        )
        self._lock = threading.RLock()
        self._state: status_pb2.ServiceState = status_pb2.SERVICE_STATE_LOADING
        self._stages = StageList(stages)
        self._activities: list[_Activity] = []
        self._failure: status_pb2.Failure | None = None
        self._booted: Booted | None = None
        self._revision = Revision()
        self._is_over = False
        self._is_usable = True

    # Start-up.

    def enter(self, stage: str) -> None:
        """Begins a stage; the one before it is done. Injected faults fire here.

        A stage may be entered by the service and again by the engine within it; only the first
        counts.
        """
        with self._lock:
            current = self._stages.current
            if current.name == stage and current.is_running:
                return
            self._stages.enter(stage)
            self._advance(state_of_stage(stage))
            self._revision.bump()
        logger.info("%s: %s", self.service, stage)
        self._faults.fire(stage)

    def skip(self, stage: str, reason: str) -> None:
        """Enters a stage that has nothing to do here, and says why."""
        self.enter(stage)
        with self._lock:
            self._stages.skip(reason)
            self._revision.bump()

    def note(self, detail: str) -> None:
        """A line of detail about the current stage."""
        with self._lock:
            self._stages.current.detail = detail
            self._revision.bump()

    def touch(self) -> None:
        """The current stage waits for something that is bounded elsewhere: its own time begins
        anew.
        """
        with self._lock:
            self._stages.current.bounded_from = time.monotonic()

    def describe(
        self,
        *,
        model_fingerprint: str = "",
        device: str = "",
        limits: Mapping[str, str],
        gpu: Callable[[], status_pb2.GpuFigures] | None = None,
    ) -> None:
        """Facts about what was booted, for the status; `gpu` is asked at each."""
        with self._lock:
            self._facts.model_fingerprint = model_fingerprint
            self._facts.device = device
            self._facts.limits = dict(limits)
            self._facts.gpu = gpu
            self._revision.bump()

    def set_links(self, links: Sequence[status_pb2.LinkStatus]) -> None:
        """The state of a target's links."""
        with self._lock:
            self._facts.links = tuple(links)
            self._revision.bump()

    def serve(self, booted: Booted) -> None:
        """The service is whole and has done its work once: requests may come."""
        with self._lock:
            if self._state in (status_pb2.SERVICE_STATE_FAILED, status_pb2.SERVICE_STATE_DRAINING):
                return
            self._stages.leave()
            self._booted = booted
            self._advance(status_pb2.SERVICE_STATE_SERVING)
            self._revision.bump()
        logger.info("%s: SERVING", self.service)

    def ready(self) -> Booted:
        """What was booted. Raises NotServing with state, stage and reason in every state but
        SERVING.
        """
        with self._lock:
            if self._state != status_pb2.SERVICE_STATE_SERVING or self._booted is None:
                raise NotServing(f"{self.service}: {self.words()}")
            return self._booted

    # Running.

    @contextmanager
    def activity(self, name: str) -> Iterator[None]:
        """Something the engine's thread does again and again; the watchdog bounds it, faults fire
        at its entry.
        """
        started = time.monotonic()
        with self._lock:
            self._activities.append(_Activity(name=name, started=started))
            first = None if name in self._stages else self._stages.add(name)
            if first is not None:
                self._revision.bump()
        self._faults.fire(name)
        yield
        # Not in a `finally`: after an exception the activity stays, so that the failure is put
        # down to it.
        with self._lock:
            self._activities.pop()
            if first is not None:
                first.end(status_pb2.STAGE_STATE_DONE)
                self._revision.bump()

    def guard(self, work: Callable[[], None]) -> None:
        """Runs the whole of a thread's work; whatever leaves it makes the service FAILED."""
        try:
            work()
        # The only broad handler of the program: an exception that nobody expected must not leave a
        # healthy-looking process with a dead thread behind it.
        except Exception as error:
            # What input, configuration or hardware can cause explains itself in a line.
            if not isinstance(error, self._expected_errors):
                logger.exception("%s: %s failed", self.service, self.current_point())
            self.fail(self.current_point(), f"{type(error).__name__}: {error}")

    def fail(self, stage: str, reason: str) -> None:
        """FAILED, for good. The first failure is the one that is kept."""
        with self._lock:
            if self._state == status_pb2.SERVICE_STATE_FAILED:
                return
            self._state = status_pb2.SERVICE_STATE_FAILED
            self._booted = None
            self._failure = status_pb2.Failure(stage=stage, reason=reason)
            self._stages.fail(stage)
            self._revision.bump()
        logger.error("%s: FAILED in stage %s: %s", self.service, stage, reason)

    def drain(self) -> None:
        """DRAINING: nothing new is taken. A service that has failed stays FAILED to the end."""
        with self._lock:
            if self._state == status_pb2.SERVICE_STATE_FAILED:
                return
            self._advance(status_pb2.SERVICE_STATE_DRAINING)
            self._revision.bump()

    def end(self) -> None:
        """The process is about to leave: watchers are told the last state and let go."""
        with self._lock:
            self._is_over = True
            self._revision.bump()

    def check_timeouts(self) -> None:
        """Makes the service FAILED if its stage or activity takes too long. Called by the
        watchdog.
        """
        now = time.monotonic()
        with self._lock:
            if self._activities:
                activity = self._activities[-1]
                if now - self._activities[0].started > self._timeouts.activity_seconds:
                    self.fail(
                        activity.name,
                        f"not finished after {now - activity.started:.1f} s "
                        f"(--step-timeout {self._timeouts.activity_seconds:g})",
                    )
            elif self._state < status_pb2.SERVICE_STATE_SERVING:
                record = self._stages.current
                if record.started and now - record.bounded_from > self._timeouts.stage_seconds:
                    self.fail(
                        record.name,
                        f"not finished after {now - record.started:.1f} s "
                        f"(--startup-timeout {self._timeouts.stage_seconds:g})"
                        + (f"; last: {record.detail}" if record.detail else ""),
                    )

    # Looking.

    @property
    def state(self) -> status_pb2.ServiceState:
        return self._state

    @property
    def is_serving(self) -> bool:
        return self._state == status_pb2.SERVICE_STATE_SERVING

    @property
    def is_healthy(self) -> bool:
        """What grpc.health.v1 says: SERVING, and of use."""
        return self.is_serving and self._is_usable

    def set_usable(self, usable: bool) -> None:
        """A serving process that can do nothing without others says so in its health."""
        with self._lock:
            if usable != self._is_usable:
                self._is_usable = usable
                self._revision.bump()

    @property
    def is_over(self) -> bool:
        """Nothing will change any more."""
        return self._is_over

    @property
    def is_draining(self) -> bool:
        """What runs may finish, nothing new is taken."""
        return self._state == status_pb2.SERVICE_STATE_DRAINING

    def current_point(self) -> str:
        """The innermost activity, or the start-up stage."""
        with self._lock:
            return self._activities[-1].name if self._activities else self._stages.current.name

    def words(self) -> str:
        """State, stage and reason in one line."""
        with self._lock:
            if self._failure is not None:
                return f"FAILED in stage {self._failure.stage}: {self._failure.reason}"
            if self._state < status_pb2.SERVICE_STATE_SERVING:
                current = self._stages.current
                detail = f": {current.detail}" if current.detail else ""
                return f"{state_name(self._state)} in stage {current.name}{detail}"
            return state_name(self._state)

    def status(self) -> status_pb2.ServiceStatus:
        """Everything, as sent to watchers."""
        with self._lock:
            status = self._facts.to_message()
            status.state = self._state
            status.stages.extend(record.to_message() for record in self._stages)
            if self._failure is not None:
                status.failure.CopyFrom(self._failure)
            return status

    @property
    def revision(self) -> int:
        """Grows with every change of the status."""
        return self._revision.value

    async def changed_since(self, revision: int) -> None:
        """Returns once `revision` is no longer the latest."""
        await self._revision.after(revision)

    def _advance(self, state: status_pb2.ServiceState) -> None:
        self._state = max(self._state, state)
