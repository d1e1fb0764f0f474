"""Does the target fit the gateway, and is the target's link to the draft service in use?"""

from dataclasses import dataclass

import grpc

from gateway.model import ServedModel, TextModel, served_model
from gateway.peer import Peer
from outrider.serving.channel import open_channel
from outrider.serving.errors import NotServing
from outrider.v1 import status_pb2, target_pb2, target_pb2_grpc


async def ask_model(
    address: str,
    own: TextModel,
    *,
    credentials: grpc.ChannelCredentials | None,
    timeout_seconds: float,
) -> ServedModel:
    """The target's model. Raises NotServing, or ModelMismatch naming the field."""
    async with open_channel(address, credentials) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            info = await stub.GetModel(target_pb2.GetModelRequest(), timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            raise NotServing(f"target: {error.code().name}: {error.details()}") from error
    return served_model(info, own)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkView:
    """The target's link to the draft process that the gateway sees."""

    is_closed_circuit: bool
    is_refused: bool
    words: str


def link_view(target: Peer, draft: Peer) -> LinkView:
    """What the target's last status says of its link to the draft service."""
    status = target.last_status
    links = [] if status is None else list(status.links)
    if not links:
        return LinkView(
            is_closed_circuit=False,
            is_refused=False,
            words="link: the target has none (its --draft-address)",
        )
    # A target has one link today; with several, the one to this very process counts.
    link = next((link for link in links if link.draft_boot_id == draft.boot_id), links[0])
    state = status_pb2.LinkState.Name(link.state).removeprefix("LINK_STATE_")
    reason = f": {link.reason}" if link.reason else ""
    is_closed = link.state == status_pb2.LINK_STATE_CLOSED_CIRCUIT
    is_same_process = link.draft_boot_id == draft.boot_id
    if is_closed and not is_same_process:
        reason = f": to another draft process than the one at {draft.address}"
    return LinkView(
        is_closed_circuit=is_closed and is_same_process,
        is_refused=link.state == status_pb2.LINK_STATE_REFUSED,
        words=f"link of the target to {link.address}: {state}{reason}",
    )
