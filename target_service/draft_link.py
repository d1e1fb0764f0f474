"""The stream to one draft service: connects, shakes hands, pings, reconnects. Knows messages, not
sequences.

Its coroutines run on the event loop; `send` may be called from any thread, and what comes goes to
the mailbox.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import grpc

from outrider.serving.channel import open_channel
from outrider.serving.concurrency import run_until_first_ends
from outrider.v1 import draft_pb2, draft_pb2_grpc, status_pb2
from target_service.acceptance_watch import AcceptanceWatch
from target_service.circuit_breaker import Circuit
from target_service.codec import RECEIVED_KINDS
from target_service.feature_intake import FeatureIntake
from target_service.link_features import NO_FEATURES, LinkFeatures
from target_service.link_handshake import LinkLost, LinkRefused, LinkSilent, read, shake_hands
from target_service.link_mailbox import LinkMailbox, LinkView
from target_service.statistics import Statistics

logger = logging.getLogger(__name__)

PING_PERIOD_SECONDS = 0.1
# A stopped peer is invisible to gRPC's keepalive for tens of seconds; its pongs are missed at once.
SILENCE_SECONDS = 1.0
HANDSHAKE_TIMEOUT_SECONDS = 2.0
FIRST_RECONNECT_PAUSE_SECONDS = 0.1
MAX_RECONNECT_PAUSE_SECONDS = 1.0
STATUS_PERIOD_SECONDS = 1.0
# Drafts are small; a larger message is not one.
MAX_RECEIVE_BYTES = 4 * 2**20
# More unsent messages than this: the peer has stopped reading.
MAX_QUEUED_MESSAGES = 64


class DraftLink:
    """One link. Construct it, run `run()` on the event loop; everything else may be called from
    any thread.
    """

    def __init__(
        self,
        *,
        address: str,
        hello: draft_pb2.Hello,
        intake: FeatureIntake,
        mailbox: LinkMailbox,
        statistics: Statistics,
        on_status: Callable[[status_pb2.LinkStatus], None],
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.address = address
        self._hello = draft_pb2.Hello()
        self._hello.CopyFrom(hello)
        self._hello.features.CopyFrom(intake.offer())
        self._intake = intake
        self._statistics = statistics
        self._on_status = on_status
        self._mailbox = mailbox
        self._credentials = credentials
        self._stream_epoch = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outgoing: asyncio.Queue[draft_pb2.LinkRequest] | None = None
        self._stream_state = status_pb2.LINK_STATE_CONNECTING
        self._reason = "not tried yet"
        self._drafter = ""
        self._draft_boot_id = 0
        self._features: LinkFeatures | None = None
        self._acceptance = AcceptanceWatch()
        self._alert = ""
        self._last_received = 0.0

    def send(self, stream_epoch: int, messages: Sequence[draft_pb2.LinkRequest]) -> None:
        """Queues messages for a stream; they are dropped if it is gone by then."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._enqueue, stream_epoch, messages)

    def num_unsent(self) -> int:
        """Messages that wait to be written."""
        outgoing = self._outgoing
        return 0 if outgoing is None else outgoing.qsize()

    async def run(self) -> None:
        """Keeps a stream to the draft service up, for ever."""
        self._loop = asyncio.get_running_loop()
        publisher = asyncio.create_task(self._publish_regularly())
        pause = FIRST_RECONNECT_PAUSE_SECONDS
        try:
            while True:
                self._stream_epoch += 1
                try:
                    await self._run_stream()
                except LinkRefused as error:
                    state, reason = status_pb2.LINK_STATE_REFUSED, str(error)
                    fell_silent = False
                except (grpc.aio.AioRpcError, LinkLost, TimeoutError) as error:
                    state, reason = status_pb2.LINK_STATE_CONNECTING, _words(error)
                    fell_silent = isinstance(error, LinkSilent)
                self._features = None
                had_link = self._mailbox.view().stream_epoch != 0
                self._mailbox.close_stream(fell_silent=had_link and fell_silent)
                if state == status_pb2.LINK_STATE_REFUSED and reason != self._reason:
                    logger.error("link to %s refused: %s", self.address, reason)
                self._set_state(state, reason)
                if had_link:
                    logger.warning("link to %s lost: %s", self.address, reason)
                    pause = FIRST_RECONNECT_PAUSE_SECONDS
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RECONNECT_PAUSE_SECONDS)
        finally:
            publisher.cancel()

    async def _run_stream(self) -> None:
        outgoing: asyncio.Queue[draft_pb2.LinkRequest] = asyncio.Queue()
        async with open_channel(
            self.address, self._credentials, max_receive_bytes=MAX_RECEIVE_BYTES
        ) as channel:
            call = draft_pb2_grpc.DraftServiceStub(channel).Link()  # type: ignore[no-untyped-call]
            if self._stream_state != status_pb2.LINK_STATE_REFUSED:
                self._set_state(status_pb2.LINK_STATE_HANDSHAKING, "")
            async with asyncio.timeout(HANDSHAKE_TIMEOUT_SECONDS):
                self._count("sent", "hello")
                reply = await shake_hands(call, self._hello, self._stream_epoch)
            self._count("received", "hello")
            features = await self._intake.take(
                call, reply, lambda: self._count("received", "feature_projection")
            )
            self._outgoing = outgoing
            self._last_received = time.monotonic()
            self._mailbox.open_stream(
                LinkView(
                    stream_epoch=self._stream_epoch,
                    draft_boot_id=reply.draft_boot_id,
                    max_draft_length=min(reply.max_draft_length, self._hello.max_draft_length),
                    max_sequence_length=reply.max_sequence_length,
                    features=features,
                )
            )
            self._drafter = reply.drafter
            self._draft_boot_id = reply.draft_boot_id
            self._features = features
            self._set_state(status_pb2.LINK_STATE_CLOSED_CIRCUIT, "")
            logger.info("link to %s: drafter %s, epoch %d, features %s", self.address,
                        reply.drafter, self._stream_epoch, self._transport())  # fmt: skip
            await run_until_first_ends(
                self._write(call, outgoing),
                self._read(call),
                self._ping(outgoing),
            )

    async def _write(
        self,
        call: "grpc.aio.StreamStreamCall",  # type: ignore[type-arg]
        outgoing: "asyncio.Queue[draft_pb2.LinkRequest]",
    ) -> None:
        while True:
            message = await outgoing.get()
            try:
                await call.write(message)
            except asyncio.InvalidStateError as error:
                # grpc.aio's word for a call that has ended before its reader saw the end.
                raise LinkLost("the stream has ended") from error
            self._count("sent", str(message.WhichOneof("kind")))

    async def _read(self, call: "grpc.aio.StreamStreamCall") -> None:  # type: ignore[type-arg]
        while True:
            response = await read(call)
            kind = response.WhichOneof("kind")
            if kind is None:
                continue
            self._last_received = time.monotonic()
            self._count("received", RECEIVED_KINDS[kind])
            if kind == "go_away":
                raise LinkLost(f"the draft service goes away: {response.go_away.reason}")
            if kind in ("draft", "resync", "refuse"):
                self._mailbox.deliver(response)

    async def _ping(self, outgoing: "asyncio.Queue[draft_pb2.LinkRequest]") -> None:
        ping_id = 0
        while True:
            await asyncio.sleep(PING_PERIOD_SECONDS)
            silence = time.monotonic() - self._last_received
            if silence > SILENCE_SECONDS:
                raise LinkSilent(f"silent for {silence:.2f} s")
            # Looked at here and not where they are sent: a peer that stopped reading stops that.
            if outgoing.qsize() > MAX_QUEUED_MESSAGES:
                raise LinkSilent(f"{outgoing.qsize()} messages wait to be sent")
            if silence >= PING_PERIOD_SECONDS / 2:
                ping_id += 1
                outgoing.put_nowait(draft_pb2.LinkRequest(ping=draft_pb2.Ping(ping_id=ping_id)))

    def _enqueue(self, stream_epoch: int, messages: Sequence[draft_pb2.LinkRequest]) -> None:
        if self._outgoing is not None and self._mailbox.view().stream_epoch == stream_epoch:
            for message in messages:
                self._outgoing.put_nowait(message)

    def _count(self, direction: str, kind: str) -> None:
        self._statistics.link_messages[direction, kind] += 1

    def _set_state(self, state: "status_pb2.LinkState", reason: str) -> None:
        self._stream_state = state
        self._reason = reason
        self._on_status(self.status())

    async def _publish_regularly(self) -> None:
        last = self.status()
        while True:
            await asyncio.sleep(STATUS_PERIOD_SECONDS)
            self._watch_acceptance()
            status = self.status()
            if status != last:
                self._on_status(status)
                last = status

    def _watch_acceptance(self) -> None:
        statistics = self._statistics
        alert = self._acceptance.look(
            draft_boot_id=self._draft_boot_id,
            drafts=statistics.drafts,
            first_accepted=statistics.accepted_per_position[0],
            hint=(
                "its drafts cost time and save none"
                if self._features is None
                else "a head trained for another model?"
            ),
        )
        if alert and not self._alert:
            logger.warning("link to %s: drafter %s: %s", self.address, self._drafter, alert)
        self._alert = alert

    def _transport(self) -> str:
        return NO_FEATURES if self._features is None else self._features.transport

    def status(self) -> status_pb2.LinkStatus:
        """For the operator."""
        state, reason = self._stream_state, self._reason
        if state == status_pb2.LINK_STATE_CLOSED_CIRCUIT:
            circuit, reason = self._mailbox.circuit()
            state = {
                Circuit.CLOSED: status_pb2.LINK_STATE_CLOSED_CIRCUIT,
                Circuit.OPEN: status_pb2.LINK_STATE_OPEN_CIRCUIT,
                Circuit.HALF_OPEN: status_pb2.LINK_STATE_HALF_OPEN_CIRCUIT,
            }[circuit]
        return status_pb2.LinkStatus(
            address=self.address,
            state=state,
            reason=reason,
            draft_boot_id=self._mailbox.view().draft_boot_id,
            stream_epoch=self._stream_epoch,
            drafter=self._drafter,
            round_trip_p50_seconds=self._statistics.link_round_trip.quantile(0.5),
            round_trip_p95_seconds=self._statistics.link_round_trip.quantile(0.95),
            feature_transport=self._transport(),
            feature_layer_ids=(
                () if self._features is None else self._features.tap.projection.layer_ids
            ),
            alert=self._alert,
        )


def _words(error: grpc.aio.AioRpcError | LinkLost | TimeoutError) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, TimeoutError):
        return f"handshake not answered within {HANDSHAKE_TIMEOUT_SECONDS:g} s"
    return str(error)
