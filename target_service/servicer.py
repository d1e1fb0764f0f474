"""TargetService over gRPC: gateways' streams in, reports out. Thin: it parses, hands over and
encodes.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc

from outrider.serving.columns import pack
from outrider.serving.concurrency import run_until_first_ends
from outrider.serving.errors import InvalidArgument, NotServing, rpc_errors
from outrider.serving.grammar_compiler import Grammar
from outrider.serving.lifecycle import Lifecycle
from outrider.v1 import target_pb2, target_pb2_grpc
from target_service.admission import request_from
from target_service.boot import Target
from target_service.grammar_admission import GrammarAdmission
from target_service.policy import policy_from
from target_service.sequence import Outcome, Request, StepSummary

# Responses that a gateway has not read; a stream that falls further behind is ended.
MAX_UNREAD_RESPONSES = 4096


class GatewayStream:
    """The ReportSink of one Decode stream: takes from the engine's thread, gives to the event
    loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.responses: asyncio.Queue[target_pb2.DecodeResponse] = asyncio.Queue()
        # Set once the gateway has stopped reading.
        self.is_stuck = asyncio.Event()

    def report(self, outcomes: Sequence[Outcome], step: StepSummary) -> None:
        self._send(target_pb2.DecodeResponse(step=encode_report(outcomes, step)))

    def reject(self, sequence_id: int, reason: int, message: str) -> None:
        rejected = target_pb2.Rejected(sequence_id=sequence_id, message=message)
        rejected.reason = reason  # type: ignore[assignment]
        self._send(target_pb2.DecodeResponse(rejected=rejected))

    def refuse(self, sequence_id: int, error: InvalidArgument) -> None:
        """A sequence that asks for what cannot be."""
        self.reject(sequence_id, target_pb2.REJECT_REASON_INVALID, str(error))

    def _send(self, response: target_pb2.DecodeResponse) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._put, response)

    def _put(self, response: target_pb2.DecodeResponse) -> None:
        self.responses.put_nowait(response)
        if self.responses.qsize() > MAX_UNREAD_RESPONSES:
            self.is_stuck.set()


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    """Holds the lifecycle, not an engine: there is nothing to call before SERVING."""

    def __init__(self, lifecycle: Lifecycle[Target]) -> None:
        self._lifecycle = lifecycle
        self._streams: set[GatewayStream] = set()

    async def flush(self) -> None:
        """Returns once every response that was given to a stream is written."""
        await asyncio.gather(*(stream.responses.join() for stream in self._streams))

    async def GetModel(
        self,
        request: target_pb2.GetModelRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> target_pb2.ModelInfo:
        async with rpc_errors(context):
            return self._lifecycle.ready().model_info
        raise AssertionError("rpc_errors aborts")

    async def GetStatistics(
        self,
        request: target_pb2.GetStatisticsRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> target_pb2.TargetStatistics:
        async with rpc_errors(context):
            return self._lifecycle.ready().statistics_message()
        raise AssertionError("rpc_errors aborts")

    async def Decode(
        self,
        request_iterator: AsyncIterator[target_pb2.DecodeRequest],
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        async with rpc_errors(context):
            target = self._lifecycle.ready()
            stream = GatewayStream(asyncio.get_running_loop())
            grammars = self._grammar_admission(target, stream)
            self._streams.add(stream)
            try:
                await run_until_first_ends(
                    self._read(target, stream, grammars, request_iterator),
                    self._write(stream, context),
                    self._wait_for_failure(),
                    self._wait_until_stuck(stream),
                )
            finally:
                self._streams.discard(stream)
                grammars.cancel()
                target.step_loop.submit(lambda loop: loop.cancel(stream))

    async def _read(
        self,
        target: Target,
        stream: GatewayStream,
        grammars: GrammarAdmission,
        requests: AsyncIterator[target_pb2.DecodeRequest],
    ) -> None:
        async for request in requests:
            kind = request.WhichOneof("kind")
            if kind == "attach":
                stream.responses.put_nowait(
                    target_pb2.DecodeResponse(
                        attached=target_pb2.Attached(target_boot_id=self._lifecycle.boot_id)
                    )
                )
            elif kind == "admit":
                self._admit(target, stream, grammars, request.admit)
            elif kind == "cancel":
                ids = frozenset(request.cancel.sequence_ids)
                grammars.cancel(ids)
                target.step_loop.submit(lambda loop, ids=ids: loop.cancel(stream, ids))  # type: ignore[misc]
            elif kind == "policy":
                policy = policy_from(request.policy, target.bounds.max_draft_length)
                target.step_loop.submit(lambda loop, policy=policy: loop.set_policy(policy))  # type: ignore[misc]

    def _admit(
        self,
        target: Target,
        stream: GatewayStream,
        grammars: GrammarAdmission,
        batch: target_pb2.AdmitBatch,
    ) -> None:
        requests: list[Request] = []
        for message in batch.sequences:
            if message.HasField("structured_output"):
                grammars.begin(message)
                continue
            try:
                requests.append(request_from(message, stream, target.bounds))
            except InvalidArgument as error:
                stream.refuse(message.sequence_id, error)
        target.step_loop.submit(lambda loop: loop.admit(requests))

    def _grammar_admission(self, target: Target, stream: GatewayStream) -> GrammarAdmission:
        def admit(message: target_pb2.Admit, grammar: Grammar) -> None:
            request = request_from(message, stream, target.bounds, grammar)
            target.step_loop.submit(lambda loop: loop.admit([request]))

        return GrammarAdmission(
            compiler=target.grammar_compiler,
            admit=admit,
            refuse=stream.refuse,
            on_task_end=self._grammar_task_ended,
        )

    def _grammar_task_ended(self, task: "asyncio.Task[None]") -> None:
        if not task.cancelled():
            error = task.exception()
            if error is not None:
                self._lifecycle.fail(task.get_name(), f"{type(error).__name__}: {error}")

    async def _write(
        self,
        stream: GatewayStream,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> None:
        while True:
            response = await stream.responses.get()
            await context.write(response)
            stream.responses.task_done()

    async def _wait_until_stuck(self, stream: GatewayStream) -> None:
        await stream.is_stuck.wait()
        raise NotServing(f"more than {MAX_UNREAD_RESPONSES} responses are unread")

    async def _wait_for_failure(self) -> None:
        while True:
            revision = self._lifecycle.revision
            is_alive = self._lifecycle.is_serving or self._lifecycle.is_draining
            if not is_alive or self._lifecycle.is_over:
                raise NotServing(f"target: {self._lifecycle.words()}")
            await self._lifecycle.changed_since(revision)


def encode_report(outcomes: Sequence[Outcome], step: StepSummary) -> target_pb2.StepReport:
    """One stream's share of a step."""
    cached = [outcome.cached_prompt_length for outcome in outcomes]
    return target_pb2.StepReport(
        step_id=step.step_id,
        mode=(
            target_pb2.STEP_MODE_SPECULATIVE if step.is_speculative else target_pb2.STEP_MODE_PLAIN
        ),
        sequence_ids=pack([outcome.sequence_id for outcome in outcomes], "<u8"),
        emitted_counts=pack([len(outcome.emitted_token_ids) for outcome in outcomes], "<u2"),
        token_ids=pack(
            [token_id for outcome in outcomes for token_id in outcome.emitted_token_ids], "<i4"
        ),
        drafted_counts=pack([outcome.drafted_length for outcome in outcomes], "<u1"),
        accepted_counts=pack([outcome.accepted_length for outcome in outcomes], "<u1"),
        finish_reasons=pack([outcome.finish_reason for outcome in outcomes], "<u1"),
        decode_rows=step.decode_rows,
        prefill_tokens=step.prefill_tokens,
        running_sequences=step.running_sequences,
        waiting_sequences=step.waiting_sequences,
        forward_seconds=step.forward_seconds,
        draft_wait_seconds=step.draft_wait_seconds,
        step_seconds=step.step_seconds,
        draft_length=step.draft_length,
        cached_prompt_counts=pack(cached, "<u4") if any(cached) else b"",
    )
