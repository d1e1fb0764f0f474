"""What a link settled about features: which tap captures them, and how they travel."""

from dataclasses import dataclass

from outrider.engine.feature_tap import Tap
from outrider.serving.link_protocol import INLINE, SHARED_MEMORY
from outrider.serving.shared_ring import SharedRing

# LinkStatus.feature_transport where none travel.
NO_FEATURES = "none"
TRANSPORTS = (INLINE, SHARED_MEMORY)

# gRPC slows down beyond messages of 4 MiB, and a message in the way delays what is behind it.
MAX_MESSAGE_FEATURE_BYTES = 2 * 2**20
# Messages full of features that one step may send; what is left over follows in the next.
MAX_FULL_MESSAGES = 4
# A ring holds at least so many full messages: its reader may be two steps behind.
RING_MESSAGES = 2 * MAX_FULL_MESSAGES


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkFeatures:
    """Of one stream. The ring is written by the engine's thread alone."""

    tap: Tap
    ring: SharedRing | None

    @property
    def transport(self) -> str:
        """How features travel."""
        return INLINE if self.ring is None else SHARED_MEMORY

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return row_bytes(self.tap.projection.width)

    @property
    def rows_per_message(self) -> int:
        """Most rows of one message."""
        most = MAX_MESSAGE_FEATURE_BYTES
        if self.ring is not None:
            most = min(most, self.ring.capacity // RING_MESSAGES)
        return max(1, most // self.row_bytes)

    @property
    def rows_per_step(self) -> int:
        """Rows that one engine step may send to catch up."""
        return MAX_FULL_MESSAGES * self.rows_per_message

    def close(self) -> None:
        """Gives the shared memory back. Called on the engine's thread once its stream is over."""
        if self.ring is not None:
            self.ring.close()


def row_bytes(width: int) -> int:
    """Bytes of a row of 16-bit numbers."""
    return 2 * width
