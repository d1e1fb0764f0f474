"""The features' part of the handshake: what is offered, and the projection that comes.

Nothing that comes is trusted: whatever is wrong with it refuses the link by name.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable

import grpc

from outrider.engine.errors import CheckpointError
from outrider.engine.feature_projection import ROW_DTYPES
from outrider.engine.feature_tap import Tap
from outrider.serving.link_protocol import INLINE, SHARED_MEMORY
from outrider.serving.shared_ring import SharedRing, host_id
from outrider.v1 import draft_pb2
from target_service.link_features import RING_MESSAGES, TRANSPORTS, LinkFeatures, row_bytes
from target_service.link_handshake import LinkLost, LinkRefused, read

logger = logging.getLogger(__name__)

# Of a drafter far wider than any target; what it makes the store reserve stays within reason.
LARGEST_WIDTH = 2**16
# Beside the tensors: names, shapes, the description.
LARGEST_HEADER_BYTES = 2**16
# As float32, the widest format that is taken.
LARGEST_NUMBER_BYTES = 4
PIECE_TIMEOUT_SECONDS = 5.0
PROJECTION_TIMEOUT_SECONDS = 60.0
# Words of an error that quotes what came.
LONGEST_REASON = 300

AUTO = "auto"


class FeatureIntake:
    """One link's. Owned by the event loop."""

    def __init__(
        self,
        *,
        layer_ids: tuple[int, ...],
        hidden_size: int,
        transport: str,
        load: Callable[[bytes], Tap],
    ) -> None:
        """`transport`: auto, inline or shared_memory. `load` raises CheckpointError and may be
        called on any thread.
        """
        self._layer_ids = layer_ids
        self._hidden_size = hidden_size
        self._transport = transport
        self._load = load
        # What the last handshake left: the same projection goes on with the features it has.
        self._tap: Tap | None = None
        # The draft process whose projection was refused last, and why.
        self._refused: tuple[int, str] | None = None

    def offer(self) -> draft_pb2.FeatureOffer:
        """For Hello."""
        return draft_pb2.FeatureOffer(
            layer_ids=self._layer_ids,
            dtypes=list(ROW_DTYPES),
            host_id="" if self._transport == INLINE else host_id(),
        )

    async def take(
        self,
        call: "grpc.aio.StreamStreamCall",  # type: ignore[type-arg]
        reply: draft_pb2.HelloReply,
        on_piece: Callable[[], None],
    ) -> LinkFeatures | None:
        """What follows a HelloReply; None where the drafter needs no features.

        Raises LinkRefused, naming what does not fit, and LinkLost. `on_piece` hears of every
        message.
        """
        if not reply.HasField("features"):
            self._tap = None
            return None
        if self._refused is not None and self._refused[0] == reply.draft_boot_id:
            # It would send the same again.
            raise LinkRefused(self._refused[1])
        needs = reply.features
        self._check(needs)
        try:
            async with asyncio.timeout(PROJECTION_TIMEOUT_SECONDS):
                data = await self._read_projection(call, needs, on_piece)
                tap = await asyncio.to_thread(self._adopt, data, needs)
        except TimeoutError as error:
            raise LinkLost(
                f"feature projection not complete within {PROJECTION_TIMEOUT_SECONDS:g} s"
            ) from error
        except _ProjectionRefused as error:
            self._refused = reply.draft_boot_id, str(error)
            raise LinkRefused(str(error)) from error
        self._tap = tap
        self._refused = None
        return LinkFeatures(tap=tap, ring=self._attach(needs))

    def _check(self, needs: draft_pb2.FeatureNeeds) -> None:
        """Raises LinkRefused for needs that were not offered."""
        layer_ids = list(needs.layer_ids)
        if not layer_ids or not set(layer_ids) <= set(self._layer_ids):
            raise _refusal("layer_ids", list(self._layer_ids), layer_ids)
        if not 1 <= needs.width <= LARGEST_WIDTH:
            raise _refusal("width", f"1 to {LARGEST_WIDTH}", needs.width)
        if needs.dtype not in ROW_DTYPES:
            raise _refusal("dtype", list(ROW_DTYPES), needs.dtype)
        if needs.transport not in TRANSPORTS:
            raise _refusal("transport", list(TRANSPORTS), needs.transport)
        if self._transport == SHARED_MEMORY and needs.transport != SHARED_MEMORY:
            raise _refusal("transport", SHARED_MEMORY, needs.transport)

    async def _read_projection(
        self,
        call: "grpc.aio.StreamStreamCall",  # type: ignore[type-arg]
        needs: draft_pb2.FeatureNeeds,
        on_piece: Callable[[], None],
    ) -> bytes:
        columns = len(needs.layer_ids) * self._hidden_size
        # Weight, bias, and norms of the whole or of the parts.
        numbers = needs.width * (columns + 1) + columns
        most = numbers * LARGEST_NUMBER_BYTES + LARGEST_HEADER_BYTES
        data = bytearray()
        while True:
            try:
                async with asyncio.timeout(PIECE_TIMEOUT_SECONDS):
                    response = await read(call)
            except TimeoutError as error:
                raise LinkLost(
                    f"feature projection: no piece within {PIECE_TIMEOUT_SECONDS:g} s"
                ) from error
            if not response.HasField("feature_projection"):
                raise LinkLost(f"{response.WhichOneof('kind')} instead of the feature projection")
            on_piece()
            piece = response.feature_projection
            data += piece.chunk
            if len(data) > most:
                raise _ProjectionRefused(
                    f"feature projection: more than {most} bytes for width {needs.width} and "
                    f"{len(needs.layer_ids)} layers of {self._hidden_size}"
                )
            if piece.is_last:
                return bytes(data)

    def _adopt(self, data: bytes, needs: draft_pb2.FeatureNeeds) -> Tap:
        """On a thread of its own: hashes, loads and checks what came."""
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 != needs.projection_sha256:
            raise _ProjectionRefused(
                f"features.projection_sha256: the target has {sha256}, "
                f"the draft {needs.projection_sha256[:LONGEST_REASON]}"
            )
        tap = self._tap
        if tap is None or tap.projection.sha256 != sha256:
            try:
                tap = self._load(data)
            # torch says RuntimeError where it finds no memory.
            except (CheckpointError, MemoryError, RuntimeError) as error:
                reason = str(error)[:LONGEST_REASON] or type(error).__name__
                raise _ProjectionRefused(f"feature projection: {reason}") from error
        projection = tap.projection
        for field, announced, found in (
            ("layer_ids", tuple(needs.layer_ids), projection.layer_ids),
            ("width", needs.width, projection.width),
            ("dtype", ROW_DTYPES[needs.dtype], projection.row_dtype),
        ):
            if announced != found:
                raise _ProjectionRefused(
                    f"features.{field}: announced as {announced}, the projection has {found}"
                )
        return tap

    def _attach(self, needs: draft_pb2.FeatureNeeds) -> SharedRing | None:
        """The ring, or None for inline. Raises LinkRefused where only a ring will do."""
        if needs.transport != SHARED_MEMORY or self._transport == INLINE:
            return None
        try:
            ring = SharedRing.attach(needs.shared_memory_name)
            if ring.capacity < RING_MESSAGES * row_bytes(needs.width):
                ring.close()
                raise ValueError(f"{ring.capacity} bytes are too few for rows of {needs.width}")
        except (OSError, ValueError) as error:
            reason = str(error)[:LONGEST_REASON]
            if self._transport == SHARED_MEMORY:
                raise LinkRefused(
                    f"features.shared_memory_name: cannot be attached: {reason}"
                ) from error
            logger.warning("features go inline: shared memory cannot be attached: %s", reason)
            return None
        return ring


class _ProjectionRefused(Exception):
    """The projection's content does not fit: the same draft process will send it again."""


def _refusal(field: str, own: object, theirs: object) -> LinkRefused:
    return LinkRefused(f"features.{field}: the target has {own}, the draft {theirs!r}")
