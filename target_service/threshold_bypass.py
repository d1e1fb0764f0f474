"""The threshold bypass in time: entered at once, left when the load has stayed down for a while."""

from target_service.policy import Policy

# Steps at or below the bound, one behind the other, before drafts are asked for again. Each return
# has the draft service take in what was committed meanwhile, so a load that swings around the bound
# must not pay for one with every swing.
RESUME_STEPS = 8


class ThresholdBypass:
    """Whether the next step asks nothing of the draft service. Owned by the engine's thread.

    Policies may come and go meanwhile; the bound is that of the one which holds.
    """

    def __init__(self) -> None:
        self._steps_left = 0

    def observe(self, policy: Policy, decode_rows: int) -> None:
        """A step that had so many decode rows. Without any, whose load it was is gone: what comes
        then is not held to it.
        """
        if decode_rows == 0 or policy.max_decode_rows is None:
            self._steps_left = 0
        elif policy.is_bypassed(decode_rows):
            self._steps_left = RESUME_STEPS
        elif self._steps_left:
            self._steps_left -= 1

    def is_on(self, policy: Policy, decode_rows: int) -> bool:
        """For a step with so many."""
        if policy.max_decode_rows is None:
            return False
        return policy.is_bypassed(decode_rows) or self._steps_left > 0
