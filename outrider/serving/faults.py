"""Faults for tests: what `OUTRIDER_INJECT_FAULT` asks to go wrong, and where.

The value is a comma-separated list of `service:point:action[@N]`. A point is a stage of that
service or one of its run-time activities. Actions: `raise`, `hang`, `exit`, `delay=SECONDS`. With
`@N` it fires from the N-th entry on.
"""

import logging
import math
import os
import sys
import time
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from outrider.serving.errors import ConfigurationError
from outrider.serving.stages import FAULT_POINTS

logger = logging.getLogger(__name__)

EXIT_CODE_OF_INJECTED_EXIT = 70
# A process that is gone cannot say where it died. The pause lets its last status reach the
# watchers, so that a test can ask whether they keep it; a real crash may lose it.
PAUSE_BEFORE_EXIT_SECONDS = 0.5
ACTIONS = ("raise", "hang", "exit", "delay")


class InjectedFault(RuntimeError):
    """What `raise` raises."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of the list."""

    point: str
    action: str
    delay_seconds: float
    first_entry: int


def parse_faults(
    service: str, text: str, own_points: Collection[str] | None = None
) -> tuple[Fault, ...]:
    """The faults of one service. Raises ConfigurationError for an entry that no service has, or
    that this one has not where its `own_points` are fewer than its kind's.
    """
    points_of = {**FAULT_POINTS}
    if own_points is not None:
        points_of[service] = tuple(own_points)
    faults = []
    for entry in filter(None, (part.strip() for part in text.split(","))):
        named_service, point, action = _split(entry)
        action, _, first_entry = action.partition("@")
        action, _, delay = action.partition("=")
        if named_service not in FAULT_POINTS:
            raise ConfigurationError(
                f"inject_fault: service {named_service!r} in {entry!r}, "
                f"must be one of {', '.join(FAULT_POINTS)}"
            )
        if point not in points_of[named_service]:
            raise ConfigurationError(
                f"inject_fault: point {point!r} in {entry!r}, must be one of "
                f"{', '.join(points_of[named_service])}"
            )
        if action not in ACTIONS or (action == "delay") != bool(delay):
            raise ConfigurationError(
                f"inject_fault: action {action!r} in {entry!r}, "
                "must be raise, hang, exit or delay=SECONDS"
            )
        try:
            parsed = Fault(
                point=point,
                action=action,
                delay_seconds=float(delay or 0),
                first_entry=int(first_entry or 1),
            )
        except ValueError as error:
            raise ConfigurationError(f"inject_fault: {entry!r}: {error}") from error
        if not 0 <= parsed.delay_seconds < math.inf or parsed.first_entry < 1:
            raise ConfigurationError(
                f"inject_fault: {entry!r}: a delay must be 0 or more seconds, @N at least 1"
            )
        if named_service == service:
            faults.append(parsed)
    return tuple(faults)


def _split(entry: str) -> tuple[str, str, str]:
    parts = entry.split(":")
    if len(parts) != 3:
        raise ConfigurationError(f"inject_fault: {entry!r} must be service:point:action")
    return parts[0], parts[1], parts[2]


class FaultInjector:
    """Fires the faults of one service. Each point is entered by one thread."""

    def __init__(self, service: str, faults: tuple[Fault, ...]) -> None:
        self._service = service
        self._faults = faults
        self._entries: Counter[str] = Counter()

    def announce(self) -> None:
        """Says loudly that this process is meant to fail."""
        for fault in self._faults:
            logger.warning(
                "FAULT INJECTION IS ON: %s will %s at %s", self._service, fault.action, fault.point
            )

    def fire(self, point: str) -> None:
        """To be called at a point's entry. Returns at once where nothing is asked of it."""
        if not self._faults:
            return
        self._entries[point] += 1
        for fault in self._faults:
            if fault.point == point and self._entries[point] >= fault.first_entry:
                self._act(fault)

    def _act(self, fault: Fault) -> None:
        where = f"{self._service}:{fault.point}"
        if fault.action == "delay":
            time.sleep(fault.delay_seconds)
            return
        logger.warning("injected fault: %s:%s", where, fault.action)
        if fault.action == "raise":
            raise InjectedFault(f"injected fault at {where}")
        if fault.action == "exit":
            time.sleep(PAUSE_BEFORE_EXIT_SECONDS)
            sys.stderr.flush()
            os._exit(EXIT_CODE_OF_INJECTED_EXIT)
        while True:
            time.sleep(3600)
