"""Whether a target fits this draft service: the first field of its Hello that does not, by name."""

from collections.abc import Iterator
from dataclasses import dataclass

from draft_service.drafters.drafter import DrafterOffer, FeatureNeeds
from outrider.engine.noise import NOISE_VERSION
from outrider.engine.prefix_hash import PREFIX_HASH_ALGORITHM
from outrider.serving.link_protocol import (
    INLINE,
    LONGEST_DRAFT_LENGTH,
    PROTOCOL_VERSION,
    SHARED_MEMORY,
)
from outrider.v1 import draft_pb2

LARGEST_VOCABULARY = 2**31 - 1

PROJECTION_CHUNK_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftIdentity:
    """What a model drafter's token ids mean. A drafter without a model takes any target's."""

    vocab_size: int
    tokenizer_sha256: str
    eos_token_ids: tuple[int, ...]


def refusal_of(
    hello: draft_pb2.Hello, identity: DraftIdentity | None, needs: FeatureNeeds | None
) -> draft_pb2.Refusal | None:
    """The first field that does not fit, with both values; None if all do."""
    for field, value, bound in (
        ("protocol_version", hello.protocol_version, PROTOCOL_VERSION),
        ("noise_version", hello.noise_version, NOISE_VERSION),
        ("prefix_hash_algorithm", hello.prefix_hash_algorithm, PREFIX_HASH_ALGORITHM),
    ):
        if value != bound:
            return _refusal(field, value, bound)
    return (
        _size_refusal(hello) or _identity_refusal(hello, identity) or _feature_refusal(hello, needs)
    )


def hello_reply(
    hello: draft_pb2.Hello,
    *,
    offer: DrafterOffer,
    draft_boot_id: int,
    refusal: draft_pb2.Refusal | None,
    shared_memory_name: str = "",
) -> draft_pb2.LinkResponse:
    """The answer to a Hello. Without a name features come inline."""
    reply = draft_pb2.HelloReply(
        draft_boot_id=draft_boot_id,
        stream_epoch=hello.stream_epoch,
        refusal=refusal,
        drafter=offer.name,
        max_draft_length=offer.max_draft_length,
        max_sequence_length=offer.max_sequence_length,
        fingerprint=offer.fingerprint,
    )
    needs = offer.feature_needs
    if needs is not None:
        reply.features.CopyFrom(
            draft_pb2.FeatureNeeds(
                layer_ids=needs.layer_ids,
                width=needs.width,
                dtype=needs.dtype,
                projection_sha256=needs.projection_sha256,
                transport=SHARED_MEMORY if shared_memory_name else INLINE,
                shared_memory_name=shared_memory_name,
            )
        )
    return draft_pb2.LinkResponse(hello=reply)


def projection_messages(needs: FeatureNeeds | None) -> Iterator[draft_pb2.LinkResponse]:
    """What follows the answer: the projection in pieces; nothing where no features are needed."""
    if needs is None:
        return
    projection = needs.projection
    for start in range(0, max(len(projection), 1), PROJECTION_CHUNK_BYTES):
        end = start + PROJECTION_CHUNK_BYTES
        yield draft_pb2.LinkResponse(
            feature_projection=draft_pb2.FeatureProjection(
                chunk=projection[start:end], is_last=end >= len(projection)
            )
        )


def _size_refusal(hello: draft_pb2.Hello) -> draft_pb2.Refusal | None:
    if hello.target_boot_id == 0:
        return _refusal("target_boot_id", 0, "not 0")
    for field, value, lowest, highest in (
        ("identity.vocab_size", hello.identity.vocab_size, 1, LARGEST_VOCABULARY),
        ("identity.max_sequence_length", hello.identity.max_sequence_length, 1, 2**32 - 1),
        ("max_sequences", hello.max_sequences, 1, 2**32 - 1),
        ("max_draft_length", hello.max_draft_length, 0, LONGEST_DRAFT_LENGTH),
    ):
        if not lowest <= value <= highest:
            return _refusal(field, value, f"{lowest} to {highest}")
    vocab_size = hello.identity.vocab_size
    for token_id in hello.identity.eos_token_ids:
        if token_id >= vocab_size:
            return _refusal("identity.eos_token_ids", token_id, f"below vocab_size {vocab_size}")
    return None


def _identity_refusal(
    hello: draft_pb2.Hello, identity: DraftIdentity | None
) -> draft_pb2.Refusal | None:
    if identity is None:
        return None
    theirs = hello.identity
    for field, value, bound in (
        ("vocab_size", theirs.vocab_size, identity.vocab_size),
        ("tokenizer_sha256", theirs.tokenizer_sha256, identity.tokenizer_sha256),
        ("eos_token_ids", sorted(theirs.eos_token_ids), sorted(identity.eos_token_ids)),
    ):
        if value != bound:
            return _refusal(f"identity.{field}", value, bound)
    return None


def _feature_refusal(
    hello: draft_pb2.Hello, needs: FeatureNeeds | None
) -> draft_pb2.Refusal | None:
    if needs is None:
        return None
    features = hello.features
    if hello.identity.hidden_size != needs.target_hidden_size:
        return _refusal(
            "identity.hidden_size", hello.identity.hidden_size, needs.target_hidden_size
        )
    if not set(needs.layer_ids) <= set(features.layer_ids):
        return _refusal("features.layer_ids", list(features.layer_ids), list(needs.layer_ids))
    if needs.dtype not in features.dtypes:
        return _refusal("features.dtypes", list(features.dtypes), needs.dtype)
    return None


def _refusal(field: str, target_value: object, draft_value: object) -> draft_pb2.Refusal:
    return draft_pb2.Refusal(
        field=field, target_value=str(target_value), draft_value=str(draft_value)
    )
