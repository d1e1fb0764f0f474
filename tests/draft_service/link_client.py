"""A target's end of a link, for tests: rows in, messages out, nothing checked."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc

from outrider.engine.noise import NOISE_VERSION
from outrider.engine.prefix_hash import (
    EMPTY_PREFIX_HASH,
    PREFIX_HASH_ALGORITHM,
    extend_prefix_hash,
)
from outrider.serving.channel import open_channel
from outrider.serving.columns import pack, unpack
from outrider.serving.link_protocol import PROTOCOL_VERSION
from outrider.v1 import draft_pb2, draft_pb2_grpc, sampling_pb2, target_pb2

VOCAB_SIZE = 1000
PATIENCE_SECONDS = 10.0


def hash_of(token_ids: Sequence[int]) -> int:
    return extend_prefix_hash(EMPTY_PREFIX_HASH, token_ids)


def hello(target_boot_id: int = 7, stream_epoch: int = 1, **changes: object) -> draft_pb2.Hello:
    """A Hello that fits the n-gram drafter, with `changes` to its fields or its identity's."""
    message = draft_pb2.Hello(
        protocol_version=PROTOCOL_VERSION,
        noise_version=NOISE_VERSION,
        prefix_hash_algorithm=PREFIX_HASH_ALGORITHM,
        target_boot_id=target_boot_id,
        stream_epoch=stream_epoch,
        identity=target_pb2.ModelIdentity(
            vocab_size=VOCAB_SIZE,
            tokenizer_sha256="a" * 64,
            eos_token_ids=[0],
            max_sequence_length=4096,
        ),
        max_sequences=64,
        max_draft_length=8,
    )
    for name, value in changes.items():
        owner = message if name in message.DESCRIPTOR.fields_by_name else message.identity
        if name == "eos_token_ids":
            owner.eos_token_ids[:] = value
        elif name == "features":
            owner.features.CopyFrom(value)
        else:
            setattr(owner, name, value)
    return message


@dataclass(frozen=True)
class Row:
    """A Step's row as it should be, of a sequence's whole text."""

    slot: int
    token_ids: Sequence[int]
    commit_count: int = 1
    draft_length: int = 4
    generation: int = 1


@dataclass
class Client:
    """One stream. Owned by a test."""

    call: grpc.aio.StreamStreamCall
    hello: draft_pb2.Hello
    step_id: int = 0
    # Answers that were read while another kind was waited for.
    seen: list[draft_pb2.LinkResponse] = field(default_factory=list)

    async def write(self, **kind: object) -> None:
        await self.call.write(draft_pb2.LinkRequest(**kind))

    async def write_last(self, **kind: object) -> None:
        """A message that makes the service end the stream, perhaps before the write returns."""
        with suppress(grpc.aio.AioRpcError):
            await self.write(**kind)

    async def read(self) -> draft_pb2.LinkResponse:
        response = await asyncio.wait_for(self.call.read(), PATIENCE_SECONDS)
        assert response is not grpc.aio.EOF, (await self.call.code(), await self.call.details())
        return response

    async def next(self, kind: str):
        """The next message of a kind; those before it go to `seen`."""
        while True:
            response = await self.read()
            if response.WhichOneof("kind") == kind:
                return getattr(response, kind)
            self.seen.append(response)

    async def shake_hands(self) -> draft_pb2.HelloReply:
        await self.write(hello=self.hello)
        return await self.next("hello")

    def stamps(self) -> dict[str, int]:
        return {
            "target_boot_id": self.hello.target_boot_id,
            "stream_epoch": self.hello.stream_epoch,
        }

    async def open(self, *sequences: tuple[int, Sequence[int]], generation: int = 1, **changes):
        """Opens (slot, token ids) and waits until they are prepared."""
        await self.write(
            open=draft_pb2.OpenBatch(
                **self.stamps(),
                sequences=[
                    open_of(slot, token_ids, generation=generation, **changes)
                    for slot, token_ids in sequences
                ],
            )
        )

    def step_of(self, *rows: Row, **changes: object) -> draft_pb2.Step:
        self.step_id += 1
        step = draft_pb2.Step(
            **self.stamps(),
            step_id=self.step_id,
            slots=pack([row.slot for row in rows], "<u4"),
            generations=pack([row.generation for row in rows], "<u4"),
            base_lengths=pack([len(row.token_ids) for row in rows], "<u4"),
            prefix_hashes=pack([hash_of(row.token_ids) for row in rows], "<u8"),
            commit_counts=pack([row.commit_count for row in rows], "<u4"),
            commit_token_ids=pack(
                [
                    token_id
                    for row in rows
                    for token_id in row.token_ids[len(row.token_ids) - row.commit_count :]
                ],
                "<i4",
            ),
            draft_lengths=pack([row.draft_length for row in rows], "<u1"),
        )
        for name, value in changes.items():
            setattr(step, name, value)
        return step

    async def step(self, *rows: Row, **changes: object) -> draft_pb2.Draft:
        """One Step and its Draft."""
        step = self.step_of(*rows, **changes)
        await self.write(step=step)
        draft = await self.next("draft")
        assert draft.step_id == step.step_id
        return draft

    async def close(self, *slots: int, generation: int = 1) -> None:
        await self.write(
            close=draft_pb2.CloseBatch(
                **self.stamps(),
                slots=pack(slots, "<u4"),
                generations=pack([generation] * len(slots), "<u4"),
            )
        )

    async def ping(self, ping_id: int = 1) -> None:
        await self.write(ping=draft_pb2.Ping(ping_id=ping_id))
        assert (await self.next("pong")).ping_id == ping_id

    def rows_seen(self, kind: str) -> list[tuple[int, int, int]]:
        """(slot, generation, held length or reason) of all Resync or Refuse messages so far."""
        rows = []
        for response in self.seen:
            if response.WhichOneof("kind") == kind:
                message = getattr(response, kind)
                last = (
                    unpack("held_lengths", message.held_lengths, "<u4")
                    if kind == "resync"
                    else unpack("reasons", message.reasons, "<u1")
                )
                slots = unpack("slots", message.slots, "<u4")
                generations = unpack("generations", message.generations, "<u4")
                rows.extend(zip(slots, generations, last, strict=True))
        return rows


def open_of(
    slot: int, text: Sequence[int], /, *, generation: int = 1, **changes: object
) -> draft_pb2.Open:
    message = draft_pb2.Open(
        slot=slot,
        generation=generation,
        token_ids=pack(text, "<i4"),
        prefix_hash=hash_of(text),
        sampling=sampling_pb2.SamplingParameters(temperature=0.0, seed=1),
    )
    for name, value in changes.items():
        if name in ("sampling", "features"):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)
    return message


def drafts_in(draft: draft_pb2.Draft) -> dict[int, list[int]]:
    """Draft tokens by slot."""
    slots = unpack("slots", draft.slots, "<u4")
    counts = unpack("token_counts", draft.token_counts, "<u1", len(slots))
    token_ids = unpack("token_ids", draft.token_ids, "<i4", sum(counts))
    drafts = {}
    for slot, count in zip(slots, counts, strict=True):
        drafts[slot] = token_ids[:count]
        token_ids = token_ids[count:]
    return drafts


@asynccontextmanager
async def connect(address: str, message: draft_pb2.Hello | None = None) -> AsyncIterator[Client]:
    """A stream whose Hello has been answered without a refusal."""
    async with raw_stream(address) as call:
        client = Client(call=call, hello=message or hello())
        reply = await client.shake_hands()
        assert not reply.HasField("refusal"), reply
        yield client


@asynccontextmanager
async def raw_stream(address: str) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    async with open_channel(address) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Link()
        try:
            yield call
        finally:
            call.cancel()
