"""Counts of what was dropped or refused, each logged at most once a second.

Thread-safe enough for what it is: each reason is counted by one thread.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable

logger = logging.getLogger(__name__)

SECONDS_BETWEEN_LOGS = 1.0


class Counters:
    """Counts by reason."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def count(self, reason: str, detail: str) -> None:
        """One more, with a line about this one."""
        self._counts[reason] += 1
        now = self._clock()
        if now - self._logged_at.get(reason, float("-inf")) >= SECONDS_BETWEEN_LOGS:
            self._logged_at[reason] = now
            logger.warning("%s (%d so far): %s", reason, self._counts[reason], detail)

    def of(self, reason: str) -> int:
        """How many so far."""
        return self._counts[reason]

    def words(self) -> str:
        """All of them in one line."""
        return ", ".join(f"{reason} {count}" for reason, count in sorted(self._counts.items()))
