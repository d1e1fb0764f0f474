"""Services that implement the protocol without a model, in the test's own event loop.

The fake target's tokens are a function of prompt, position and seed only, like a real target's:
`token_at`. Drafts change counts, never tokens, unless a test asks for a lying target.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import grpc

from outrider.serving.channel import SERVER_OPTIONS
from outrider.serving.columns import pack, unpack
from outrider.v1 import (
    generation_pb2,
    status_pb2,
    status_pb2_grpc,
    target_pb2,
    target_pb2_grpc,
)

SERVING = status_pb2.SERVICE_STATE_SERVING
LOADING = status_pb2.SERVICE_STATE_LOADING
FAILED = status_pb2.SERVICE_STATE_FAILED


class FakeStatus(status_pb2_grpc.StatusServiceServicer):
    """A service's status that a test sets."""

    def __init__(self, service: str) -> None:
        self.message = status_pb2.ServiceStatus(
            service=service, state=SERVING, boot_id=random.getrandbits(63) | 1
        )
        # Neither answers nor sends, like a stopped process.
        self.is_hanging = False
        self._changed = asyncio.Event()

    def set(self, change: Callable[[status_pb2.ServiceStatus], None]) -> None:
        change(self.message)
        self._changed.set()
        self._changed = asyncio.Event()

    def fail(self, stage: str, reason: str) -> None:
        def change(message: status_pb2.ServiceStatus) -> None:
            message.state = FAILED
            message.failure.stage = stage
            message.failure.reason = reason

        self.set(change)

    async def GetStatus(self, request, context):
        while self.is_hanging:
            await asyncio.sleep(0.02)
        return self.message

    async def WatchStatus(self, request, context):
        while True:
            changed = self._changed
            yield self.message
            await changed.wait()


@dataclass(slots=True, kw_only=True)
class FakeSequence:
    admit: target_pb2.Admit
    prompt: list[int]
    draft_length: int
    emitted: int = 0


def token_at(prompt: Sequence[int], seed: int, position: int, vocabulary: Sequence[int]) -> int:
    """The token that the fake model says at a position of the output."""
    return random.Random(f"{list(prompt)[-8:]}{seed}{position}").choice(vocabulary)


@dataclass(slots=True, kw_only=True)
class FakeModel:
    """What the fake target serves, and how it behaves."""

    info: target_pb2.ModelInfo
    vocabulary: Sequence[int]
    # Overrides token_at for a test's own text.
    script: list[int] | None = None
    cached_prompt_tokens: int = 0
    eos_token_id: int = 0
    eos_after: int | None = None
    accepts: bool = True
    # Position of the output at which drafts change the token.
    lies_with_drafts_at: int | None = None
    step_seconds: float = 0.0
    admit_limit: int = 10**9
    # A request with this seed ends every stream that it comes to.
    poison_seed: int | None = None
    is_stalled: bool = False
    # Every step is one of prefill and emits nothing.
    is_prefilling: bool = False
    admitted: list[target_pb2.AdmitBatch] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    policies: list[target_pb2.SpeculationPolicy] = field(default_factory=list)
    # Most sequences with drafts in one step.
    most_drafting: int = 0
    statistics: target_pb2.TargetStatistics = field(default_factory=target_pb2.TargetStatistics)

    def token(self, sequence: FakeSequence, position: int) -> int:
        if self.eos_after is not None and position >= self.eos_after:
            if not sequence.admit.ignore_eos:
                return self.eos_token_id
        if self.script is not None and not sequence.admit.priority:
            return self.script[position % len(self.script)]
        token = token_at(sequence.prompt, sequence.admit.sampling.seed, position, self.vocabulary)
        if sequence.draft_length and position == self.lies_with_drafts_at:
            return self.vocabulary[0] if token != self.vocabulary[0] else self.vocabulary[1]
        return token


class FakeTarget(target_pb2_grpc.TargetServiceServicer):
    """Decodes every running sequence by 1 + draft length tokens a step."""

    def __init__(self, model: FakeModel, status: FakeStatus) -> None:
        self.model = model
        self._status = status

    async def GetModel(self, request, context):
        return self.model.info

    async def GetStatistics(self, request, context):
        return self.model.statistics

    async def Decode(self, request_iterator: AsyncIterator[target_pb2.DecodeRequest], context):
        running: dict[int, FakeSequence] = {}
        arrived = asyncio.Event()
        reader = asyncio.create_task(self._read(request_iterator, context, running, arrived))
        try:
            while True:
                if not running or self.model.is_stalled:
                    arrived.clear()
                    if reader.done():
                        reader.result()
                        return
                    with suppress(TimeoutError):
                        await asyncio.wait_for(arrived.wait(), 0.05)
                    continue
                await asyncio.sleep(self.model.step_seconds)
                if self._status.message.state == FAILED:
                    failure = self._status.message.failure
                    await context.abort(
                        grpc.StatusCode.UNAVAILABLE,
                        f"target: FAILED in stage {failure.stage}: {failure.reason}",
                    )
                if any(
                    one.admit.sampling.seed == self.model.poison_seed for one in running.values()
                ):
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "killed by the poison")
                if running:
                    await context.write(target_pb2.DecodeResponse(step=self._step(running)))
        finally:
            reader.cancel()

    async def _read(self, requests, context, running, arrived) -> None:
        async for request in requests:
            kind = request.WhichOneof("kind")
            self.model.kinds.append(kind)
            if kind == "attach":
                attached = target_pb2.Attached(target_boot_id=self._status.message.boot_id)
                await context.write(target_pb2.DecodeResponse(attached=attached))
            elif kind == "policy":
                self.model.policies.append(request.policy)
            elif kind == "cancel":
                for sequence_id in request.cancel.sequence_ids:
                    self.model.cancelled.append(sequence_id)
                    running.pop(sequence_id, None)
            else:
                self.model.admitted.append(request.admit)
                for admit in request.admit.sequences:
                    if len(running) >= self.model.admit_limit:
                        rejected = target_pb2.Rejected(
                            sequence_id=admit.sequence_id,
                            reason=target_pb2.REJECT_REASON_OVERLOADED,
                            message="the queue is full",
                        )
                        await context.write(target_pb2.DecodeResponse(rejected=rejected))
                        continue
                    running[admit.sequence_id] = FakeSequence(
                        admit=admit,
                        prompt=unpack("prompt", admit.prompt_token_ids, "<i4"),
                        draft_length=self._draft_length(admit),
                        emitted=len(admit.resumed_output_token_ids) // 4,
                    )
            arrived.set()

    def _draft_length(self, admit: target_pb2.Admit) -> int:
        if admit.HasField("speculation"):
            return admit.speculation.draft_length
        return 3 if self.model.policies and self.model.policies[-1].rules else 0

    def _step(self, running: dict[int, FakeSequence]) -> target_pb2.StepReport:
        if self.model.is_prefilling:
            return target_pb2.StepReport(prefill_tokens=256)
        ids, counts, tokens, drafted, accepted, reasons = [], [], [], [], [], []
        cached = []
        drafting = sum(sequence.draft_length > 0 for sequence in running.values())
        self.model.most_drafting = max(self.model.most_drafting, drafting)
        for sequence_id, sequence in list(running.items()):
            length = sequence.draft_length
            # With the first tokens, as a target does.
            cached.append(0 if sequence.emitted else self.model.cached_prompt_tokens)
            wanted = 1 + (length if self.model.accepts else 0)
            emitted: list[int] = []
            reason = 0
            for _ in range(wanted):
                token = self.model.token(sequence, sequence.emitted)
                emitted.append(token)
                sequence.emitted += 1
                stops = set(sequence.admit.stop_token_ids)
                if not sequence.admit.ignore_eos:
                    stops.add(self.model.eos_token_id)
                if token in stops:
                    reason = generation_pb2.FINISH_REASON_STOP
                elif sequence.emitted == sequence.admit.max_tokens:
                    reason = generation_pb2.FINISH_REASON_LENGTH
                if reason:
                    break
            ids.append(sequence_id)
            counts.append(len(emitted))
            tokens.extend(emitted)
            drafted.append(length)
            accepted.append(min(length, len(emitted)) if self.model.accepts else 0)
            reasons.append(reason)
            if reason:
                del running[sequence_id]
        return target_pb2.StepReport(
            sequence_ids=pack(ids, "<u8"),
            emitted_counts=pack(counts, "<u2"),
            token_ids=pack(tokens, "<i4"),
            drafted_counts=pack(drafted, "<u1"),
            accepted_counts=pack(accepted, "<u1"),
            finish_reasons=pack(reasons, "<u1"),
            cached_prompt_counts=pack(cached, "<u4") if any(cached) else b"",
        )


@dataclass(slots=True, kw_only=True)
class FakePeer:
    """One running fake service; `stop` and `start` keep its port."""

    status: FakeStatus
    add: Callable[[grpc.aio.Server], None]
    port: int = 0
    credentials: grpc.ServerCredentials | None = None
    server: grpc.aio.Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self.server = grpc.aio.server(options=SERVER_OPTIONS)
        status_pb2_grpc.add_StatusServiceServicer_to_server(self.status, self.server)
        self.add(self.server)
        address = f"127.0.0.1:{self.port}"
        self.port = (
            self.server.add_insecure_port(address)
            if self.credentials is None
            else self.server.add_secure_port(address, self.credentials)
        )
        await self.server.start()

    async def stop(self) -> None:
        if self.server is not None:
            await self.server.stop(0)
            self.server = None

    def new_process(self) -> None:
        """The status of a process that has just started at the same port."""
        self.status.message.boot_id = random.getrandbits(63) | 1
        self.status.message.state = SERVING
        self.status.message.ClearField("failure")
