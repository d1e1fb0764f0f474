"""outrider.v1.DraftService: a stream's handshake, then its messages to the engine thread and back.

Runs on the event loop and does no work on what the messages say.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Literal, TypeAlias

import grpc

from draft_service.counters import Counters
from draft_service.drafters.drafter import DrafterOffer, FeatureNeeds
from draft_service.engine_thread import Mailbox
from draft_service.first_draft import FirstDraft
from draft_service.handshake import (
    DraftIdentity,
    hello_reply,
    projection_messages,
    refusal_of,
)
from draft_service.link_sessions import terms_of
from draft_service.links import LinkTable, TargetLink
from outrider.serving.errors import InvalidArgument, NotServing, rpc_errors
from outrider.serving.lifecycle import Lifecycle
from outrider.serving.link_protocol import INLINE, SHARED_MEMORY
from outrider.serving.shared_ring import SharedRing, host_id, random_ring_name
from outrider.v1 import draft_pb2, draft_pb2_grpc

HELLO_TIMEOUT_SECONDS = 10.0

# Features that may wait for the engine thread: of a row of 2 KiB 16,384 positions.
FEATURE_RING_BYTES = 32 * 2**20

Requests = AsyncIterator[draft_pb2.LinkRequest]
Context: TypeAlias = "grpc.aio.ServicerContext[draft_pb2.LinkRequest, draft_pb2.LinkResponse]"


@dataclass(frozen=True, slots=True, kw_only=True)
class BootedDraft:
    """A draft service that has proposed once."""

    offer: DrafterOffer
    identity: DraftIdentity | None
    mailbox: Mailbox
    first_draft: FirstDraft


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """The link's end at the draft."""

    def __init__(
        self,
        *,
        lifecycle: Lifecycle[BootedDraft],
        links: LinkTable,
        counters: Counters,
        feature_transport: Literal["auto", "inline", "shared_memory"],
    ) -> None:
        """`feature_transport` auto: shared memory with a target of this host, else inline;
        shared_memory: any other target is refused.
        """
        self._lifecycle = lifecycle
        self._links = links
        self._counters = counters
        self._feature_transport = feature_transport

    async def Link(self, request_iterator: Requests, context: Context) -> None:
        async with rpc_errors(context):
            booted = self._lifecycle.ready()
            hello = await _first_message(request_iterator)
            refusal = refusal_of(
                hello, booted.identity, booted.offer.feature_needs
            ) or self._epoch_refusal(hello)
            if refusal is not None:
                await self._refuse(hello, booted, refusal, context)
                return
            needs = booted.offer.feature_needs
            with self._feature_ring(hello, needs) as ring:
                if needs is not None and ring is None and self._feature_transport == SHARED_MEMORY:
                    refusal = draft_pb2.Refusal(
                        field="features.transport",
                        target_value=INLINE,
                        draft_value=SHARED_MEMORY,
                    )
                    await self._refuse(hello, booted, refusal, context)
                    return
                await self._serve_link(hello, booted, ring, request_iterator, context)

    async def _refuse(
        self,
        hello: draft_pb2.Hello,
        booted: BootedDraft,
        refusal: draft_pb2.Refusal,
        context: Context,
    ) -> None:
        self._counters.count(
            "handshakes refused",
            f"{refusal.field} is {refusal.target_value}, must be {refusal.draft_value}",
        )
        await context.write(
            hello_reply(
                hello,
                offer=booted.offer,
                draft_boot_id=self._lifecycle.boot_id,
                refusal=refusal,
            )
        )

    @contextmanager
    def _feature_ring(
        self, hello: draft_pb2.Hello, needs: FeatureNeeds | None
    ) -> Iterator[SharedRing | None]:
        """The link's shared memory, gone behind it; None where features come inline."""
        theirs = hello.features.host_id
        if needs is None or self._feature_transport == INLINE or not theirs or theirs != host_id():
            yield None
            return
        try:
            ring = SharedRing.create(random_ring_name(), FEATURE_RING_BYTES)
        except OSError as error:
            self._counters.count("links without shared memory", str(error))
            yield None
            return
        try:
            yield ring
        finally:
            # The engine thread may be reading: it finds nothing there any more.
            ring.close()

    async def _serve_link(
        self,
        hello: draft_pb2.Hello,
        booted: BootedDraft,
        ring: SharedRing | None,
        requests: Requests,
        context: Context,
    ) -> None:
        link = TargetLink(terms_of(hello, ring), self._counters)
        # Before anything is awaited: an older stream of this target must not slip behind.
        self._links.add(link)
        booted.mailbox.attach(link.terms, link)
        reply = hello_reply(
            hello,
            offer=booted.offer,
            draft_boot_id=self._lifecycle.boot_id,
            refusal=None,
            shared_memory_name=ring.name if ring is not None else "",
        )
        greeting = chain((reply,), projection_messages(booted.offer.feature_needs))
        try:
            await self._serve(link, booted.mailbox, greeting, requests, context)
        finally:
            link.end("the stream has ended")
            booted.mailbox.detach(link.terms)
            self._links.remove(link)

    def _epoch_refusal(self, hello: draft_pb2.Hello) -> draft_pb2.Refusal | None:
        older = self._links.find(hello.target_boot_id)
        if older is None or hello.stream_epoch > older.terms.stream_epoch:
            return None
        return draft_pb2.Refusal(
            field="stream_epoch",
            target_value=str(hello.stream_epoch),
            draft_value=f"above {older.terms.stream_epoch}",
        )

    async def _serve(
        self,
        link: TargetLink,
        mailbox: Mailbox,
        greeting: Iterable[draft_pb2.LinkResponse],
        requests: Requests,
        context: Context,
    ) -> None:
        """Until the target closes its side, or the link is ended from here: then NotServing."""
        reading = asyncio.create_task(self._read(link, mailbox, requests))
        writing = asyncio.create_task(_write(greeting, link, context))
        try:
            await asyncio.wait((reading, writing, link.ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            reading.cancel()
            writing.cancel()
            await asyncio.gather(reading, writing, return_exceptions=True)
        for task in (reading, writing):
            if not task.cancelled():
                task.result()
        if link.ended.done():
            raise NotServing(link.ended.result())

    async def _read(self, link: TargetLink, mailbox: Mailbox, requests: Requests) -> None:
        async for request in requests:
            if request.WhichOneof("kind") == "ping":
                pong = draft_pb2.Pong(ping_id=request.ping.ping_id)
                link.send([draft_pb2.LinkResponse(pong=pong)])
                continue
            await link.make_room(request.ByteSize())
            mailbox.receive(link.terms, request)


async def _write(
    greeting: Iterable[draft_pb2.LinkResponse], link: TargetLink, context: Context
) -> None:
    for message in greeting:
        await context.write(message)
    while True:
        await context.write(await link.next_answer())


async def _first_message(requests: Requests) -> draft_pb2.Hello:
    """The Hello. Raises InvalidArgument for anything else, NotServing if nothing comes."""
    try:
        request = await asyncio.wait_for(anext(requests, None), HELLO_TIMEOUT_SECONDS)
    except TimeoutError as error:
        raise NotServing(f"no Hello within {HELLO_TIMEOUT_SECONDS:g} s") from error
    kind = request.WhichOneof("kind") if request is not None else None
    if request is None or kind != "hello":
        raise InvalidArgument("kind", kind, "hello in the first message of a stream")
    return request.hello
