"""A draft service for tests whose every answer can be bent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
from fake_engine import oracle

from outrider.engine.sampling import Sampling
from outrider.v1 import draft_pb2, draft_pb2_grpc


def column(data: bytes, dtype: str) -> list[int]:
    return np.frombuffer(data, dtype).tolist()


@dataclass
class HeldSequence:
    """What the fake knows of a sequence."""

    tokens: list[int]
    sampling: Sampling


Bend = Callable[[draft_pb2.Draft], draft_pb2.Draft | None]


@dataclass
class FakeDraftService(draft_pb2_grpc.DraftServiceServicer):
    """Proposes the oracle's own tokens; `bend` may change or drop each Draft."""

    boot_id: int = 7
    bend: Bend = lambda draft: draft
    delay_seconds: float = 0.0
    refusal: draft_pb2.Refusal | None = None
    answers_pings: bool = True
    # What it needs of features, and what it sends behind its answer to Hello.
    needs: draft_pb2.FeatureNeeds | None = None
    projection: Sequence[draft_pb2.LinkResponse] = ()
    forgets: bool = False
    num_streams: int = 0
    held: dict[tuple[int, int], HeldSequence] = field(default_factory=dict)

    async def Link(
        self,
        request_iterator: AsyncIterator[draft_pb2.LinkRequest],
        context: grpc.aio.ServicerContext,
    ) -> AsyncIterator[draft_pb2.LinkResponse]:
        self.num_streams += 1
        self.held.clear()
        async for request in request_iterator:
            kind = request.WhichOneof("kind")
            if kind == "hello":
                self.hello = request.hello
                yield draft_pb2.LinkResponse(hello=self._reply(request.hello))
                for piece in self.projection:
                    yield piece
            elif kind == "open":
                for row in request.open.sequences:
                    sampling = row.sampling
                    self.held[row.slot, row.generation] = HeldSequence(
                        tokens=column(row.token_ids, "<i4"),
                        sampling=Sampling(
                            temperature=sampling.temperature, top_k=sampling.top_k,
                            top_p=sampling.top_p, min_p=sampling.min_p, seed=sampling.seed,
                        ),
                    )  # fmt: skip
            elif kind == "close":
                close = request.close
                for key in zip(column(close.slots, "<u4"), column(close.generations, "<u4"),
                               strict=True):  # fmt: skip
                    del self.held[key]
            elif kind == "ping" and self.answers_pings:
                yield draft_pb2.LinkResponse(pong=draft_pb2.Pong(ping_id=request.ping.ping_id))
            elif kind == "step":
                async for response in self._answer(request.step):
                    yield response

    def _reply(self, hello: draft_pb2.Hello) -> draft_pb2.HelloReply:
        return draft_pb2.HelloReply(
            draft_boot_id=self.boot_id,
            stream_epoch=hello.stream_epoch,
            refusal=self.refusal,
            drafter="fake",
            max_draft_length=hello.max_draft_length,
            max_sequence_length=10_000,
            features=self.needs,
        )

    async def _answer(self, step: draft_pb2.Step) -> AsyncIterator[draft_pb2.LinkResponse]:
        slots = column(step.slots, "<u4")
        generations = column(step.generations, "<u4")
        if self.forgets:
            self.forgets = False
            self.held.clear()
            yield draft_pb2.LinkResponse(
                resync=draft_pb2.Resync(
                    target_boot_id=step.target_boot_id,
                    stream_epoch=step.stream_epoch,
                    slots=step.slots,
                    generations=step.generations,
                    held_lengths=bytes(4 * len(slots)),
                )
            )
            return
        commits = column(step.commit_token_ids, "<i4")
        drafts: list[list[int]] = []
        for index, base_length in enumerate(column(step.base_lengths, "<u4")):
            held = self.held[slots[index], generations[index]]
            count = column(step.commit_counts, "<u4")[index]
            committed, commits = commits[:count], commits[count:]
            held.tokens += committed
            assert len(held.tokens) == base_length
            length = column(step.draft_lengths, "<u1")[index]
            drafts.append(oracle(held.tokens, held.sampling, length))
        if self.delay_seconds:
            await asyncio.sleep(self.delay_seconds)
        draft = self.bend(
            draft_pb2.Draft(
                draft_boot_id=self.boot_id,
                target_boot_id=step.target_boot_id,
                stream_epoch=step.stream_epoch,
                step_id=step.step_id,
                slots=step.slots,
                generations=step.generations,
                base_lengths=step.base_lengths,
                prefix_hashes=step.prefix_hashes,
                token_counts=bytes(len(tokens) for tokens in drafts),
                token_ids=np.concatenate([np.array(tokens, "<i4") for tokens in drafts]).tobytes(),
            )
        )
        if draft is not None:
            yield draft_pb2.LinkResponse(draft=draft)
