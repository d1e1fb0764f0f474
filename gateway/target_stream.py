"""The gateway's Decode stream to one target process: requests out, one report per step in.

Knows nothing of queues or clients; what arrives goes to a listener. Belongs to the event loop.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import grpc

from gateway.step import SequenceStep, unpack_report
from outrider.serving.channel import open_channel
from outrider.serving.columns import MalformedColumn
from outrider.serving.errors import NotServing
from outrider.v1 import target_pb2, target_pb2_grpc

# Learns from a step: the report and what it did by sequence id.
Observe = Callable[[target_pb2.StepReport, Sequence[tuple[int, SequenceStep]]], None]


class StreamListener(Protocol):
    """Who is told what the target says."""

    def stepped(
        self, steps: Iterable[tuple[int, SequenceStep]], *, has_prefill: bool = False
    ) -> None:
        """One engine step did this, by sequence id."""

    def rejected(self, sequence_id: int, reason: int, message: str) -> None:
        """A sequence was not admitted, or ended because of what it asks for."""

    def lost(self, reason: str) -> None:
        """The stream ended; nothing more will come."""


class TargetStream:
    """An open stream. Made by `open_stream`; `run` reads it until it ends."""

    def __init__(
        self,
        *,
        channel: grpc.aio.Channel,
        call: "grpc.aio.StreamStreamCall[target_pb2.DecodeRequest, target_pb2.DecodeResponse]",
        target_boot_id: int,
        vocab_size: int,
    ) -> None:
        self.target_boot_id = target_boot_id
        self._vocab_size = vocab_size
        self._heard_at = time.monotonic()
        self._channel = channel
        self._call = call
        self._outgoing: asyncio.Queue[target_pb2.DecodeRequest] = asyncio.Queue()

    @property
    def silent_seconds(self) -> float:
        """How long ago the target said anything here."""
        return time.monotonic() - self._heard_at

    def admit(self, sequences: Iterable[target_pb2.Admit]) -> None:
        """Sends sequences together."""
        batch = target_pb2.AdmitBatch(sequences=sequences)
        self._outgoing.put_nowait(target_pb2.DecodeRequest(admit=batch))

    def cancel(self, sequence_ids: Iterable[int]) -> None:
        """Ends sequences; the target ignores those that have ended."""
        cancel = target_pb2.Cancel(sequence_ids=sequence_ids)
        self._outgoing.put_nowait(target_pb2.DecodeRequest(cancel=cancel))

    def set_policy(self, policy: target_pb2.SpeculationPolicy) -> None:
        """From the target's next step on."""
        self._outgoing.put_nowait(target_pb2.DecodeRequest(policy=policy))

    async def run(self, listener: StreamListener, observe: Observe) -> None:
        """Reads and writes until the stream ends, tells the listener why and closes. `observe` is
        called after the listener for each step that its sequences took part in.
        """
        writer = asyncio.create_task(self._write())
        reason = "the stream was closed by the gateway"
        try:
            reason = await self._read(listener, observe)
        finally:
            writer.cancel()
            # Before the first await: whoever waits for tokens hears of it even if this task is
            # being cancelled.
            listener.lost(reason)
            self._call.cancel()
            await self._channel.close()

    async def _read(self, listener: StreamListener, observe: Observe) -> str:
        try:
            while True:
                response = await self._call.read()
                if not isinstance(response, target_pb2.DecodeResponse):
                    break
                self._heard_at = time.monotonic()
                kind = response.WhichOneof("kind")
                if kind == "step":
                    steps = unpack_report(response.step, self._vocab_size)
                    listener.stepped(steps, has_prefill=response.step.prefill_tokens > 0)
                    # A step that only others took part in, or only prompts, teaches nothing.
                    if steps:
                        observe(response.step, steps)
                elif kind == "rejected":
                    rejected = response.rejected
                    listener.rejected(rejected.sequence_id, rejected.reason, rejected.message)
        except grpc.aio.AioRpcError as error:
            return f"{error.code().name}: {error.details()}"
        except MalformedColumn as error:
            return f"the target's report is malformed: {error}"
        return f"the target ended the stream: {(await self._call.code()).name}"

    async def _write(self) -> None:
        while True:
            message = await self._outgoing.get()
            try:
                await self._call.write(message)
            except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                # The call has ended; the reader learns why and says so.
                return


async def open_stream(
    address: str,
    *,
    credentials: grpc.ChannelCredentials | None,
    gateway_boot_id: int,
    policy: target_pb2.SpeculationPolicy,
    vocab_size: int,
    timeout_seconds: float,
) -> TargetStream:
    """Attaches to the target and sends the policy first. Raises NotServing with the reason."""
    channel = open_channel(address, credentials)
    stub = target_pb2_grpc.TargetServiceStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Decode()
    try:
        async with asyncio.timeout(timeout_seconds):
            attach = target_pb2.Attach(gateway_boot_id=gateway_boot_id)
            await call.write(target_pb2.DecodeRequest(attach=attach))
            await call.write(target_pb2.DecodeRequest(policy=policy))
            response = await call.read()
        if response is grpc.aio.EOF:
            reason = f"{(await call.code()).name}: {await call.details()}"
        elif response.WhichOneof("kind") == "attached":
            return TargetStream(
                channel=channel,
                call=call,
                target_boot_id=response.attached.target_boot_id,
                vocab_size=vocab_size,
            )
        else:
            reason = f"it answered attach with {response.WhichOneof('kind')}"
    except grpc.aio.AioRpcError as error:
        reason = f"{error.code().name}: {error.details()}"
    except asyncio.InvalidStateError:
        reason = f"{(await call.code()).name}: {await call.details()}"
    except TimeoutError:
        reason = f"no answer to attach within {timeout_seconds:g} s"
    call.cancel()
    await channel.close()
    raise NotServing(f"target: the Decode stream did not open: {reason}")
