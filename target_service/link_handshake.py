"""The first messages of a link: Hello and its answer, or the refusal by name."""

import grpc

from outrider.v1 import draft_pb2


class LinkLost(Exception):
    """The stream is of no further use."""


class LinkSilent(LinkLost):
    """The stream is up and nothing comes over it, or nothing is taken."""


class LinkRefused(LinkLost):
    """The draft service does not fit; another try needs another draft process."""


async def shake_hands(
    call: "grpc.aio.StreamStreamCall",  # type: ignore[type-arg]
    hello: draft_pb2.Hello,
    stream_epoch: int,
) -> draft_pb2.HelloReply:
    """Says Hello for a stream and returns the answer. Raises LinkRefused and LinkLost."""
    own_hello = draft_pb2.Hello()
    own_hello.CopyFrom(hello)
    own_hello.stream_epoch = stream_epoch
    await call.write(draft_pb2.LinkRequest(hello=own_hello))
    response = await read(call)
    if not response.HasField("hello"):
        raise LinkLost(f"{response.WhichOneof('kind')} instead of an answer to the handshake")
    reply: draft_pb2.HelloReply = response.hello
    if reply.HasField("refusal"):
        refusal = reply.refusal
        raise LinkRefused(
            f"{refusal.field}: the target has {refusal.target_value}, "
            f"the draft {refusal.draft_value}"
        )
    return reply


async def read(call: "grpc.aio.StreamStreamCall") -> draft_pb2.LinkResponse:  # type: ignore[type-arg]
    """The next message. Raises LinkLost, with the call's own words, at the end of the stream."""
    response = await call.read()
    if not isinstance(response, draft_pb2.LinkResponse):
        code, details = await call.code(), await call.details()
        raise LinkLost(f"the draft service ended the stream: {code.name}: {details}")
    return response
