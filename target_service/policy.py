"""When to speculate: the gateway's table, looked up with each step's own number of decode rows."""

from dataclasses import dataclass

from outrider.v1 import target_pb2

# Why a step with decode rows asks nothing of the draft service.
THRESHOLD = "threshold"
DRAFT_LENGTH_ZERO = "draft_length_zero"
NO_DRAFT_SERVICE = "no_draft_service"
LINK_DOWN = "link_down"
CIRCUIT_OPEN = "circuit_open"
# The sequences began to decode in this very step, the draft service refused them, or a draft would
# have come later than it is worth.
NOT_ASKED = "not_asked"
BYPASS_REASONS = (
    THRESHOLD, DRAFT_LENGTH_ZERO, NO_DRAFT_SERVICE, LINK_DOWN, CIRCUIT_OPEN, NOT_ASKED,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`rules` are (decode rows up to which it holds, draft length), ascending; 0 beyond the
    last.
    """

    rules: tuple[tuple[int, int], ...] = ()
    max_decode_rows: int | None = None

    def is_bypassed(self, decode_rows: int) -> bool:
        """More decode rows than the hard bound: the draft service is not called at all."""
        return self.max_decode_rows is not None and decode_rows > self.max_decode_rows

    def draft_length(self, decode_rows: int) -> int:
        """Draft length of a step with so many decode rows, the bound aside."""
        for max_decode_rows, draft_length in self.rules:
            if decode_rows <= max_decode_rows:
                return draft_length
        return 0


def policy_from(message: target_pb2.SpeculationPolicy, max_draft_length: int) -> Policy:
    """The policy in a message, within the target's own bound on draft lengths.

    Rules are sorted, so that their order on the wire does not matter.
    """
    return Policy(
        rules=tuple(
            sorted(
                (rule.max_decode_rows, min(rule.draft_length, max_draft_length))
                for rule in message.rules
            )
        ),
        max_decode_rows=message.max_decode_rows if message.HasField("max_decode_rows") else None,
    )
