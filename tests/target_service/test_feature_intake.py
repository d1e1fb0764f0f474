"""The features' part of the handshake, with draft services that do all of it wrong: the link is
refused by name, and the target goes on.
"""

import asyncio
import hashlib
import logging
import re

import pytest
import torch
from fake_draft_service import FakeDraftService
from fake_engine import HIDDEN_SIZE
from feature_peer import LAYERS, ROW_BYTES, WIDTH, projection_bytes
from test_target_link import OFFERED_LAYERS, is_closed_circuit, linked, until

from outrider.engine.feature_projection import serialise_projection
from outrider.serving.config import parse_config
from outrider.serving.errors import ConfigurationError
from outrider.serving.shared_ring import SharedRing, host_id, random_ring_name
from outrider.v1 import draft_pb2, status_pb2
from target_service import feature_intake
from target_service.config import TargetConfig
from target_service.feature_layers import parse_feature_layers


def pieces_of(data: bytes, size: int = 100) -> list[draft_pb2.LinkResponse]:
    return [
        draft_pb2.LinkResponse(
            feature_projection=draft_pb2.FeatureProjection(
                chunk=data[start : start + size], is_last=start + size >= len(data)
            )
        )
        for start in range(0, len(data), size)
    ]


def needs_of(data: bytes, **changes: object) -> draft_pb2.FeatureNeeds:
    fields: dict[str, object] = {
        "layer_ids": LAYERS,
        "width": WIDTH,
        "dtype": "bfloat16",
        "projection_sha256": hashlib.sha256(data).hexdigest(),
        "transport": "inline",
    }
    return draft_pb2.FeatureNeeds(**(fields | changes))


def draft_service(data: bytes, **changes: object) -> FakeDraftService:
    return FakeDraftService(needs=needs_of(data, **changes), projection=pieces_of(data))


def serialised(weight: torch.Tensor, **changes: object) -> bytes:
    fields: dict[str, object] = {
        "layer_ids": LAYERS, "row_dtype": torch.bfloat16, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    return serialise_projection({"fc.weight": weight}, **(fields | changes))  # type: ignore[arg-type]


GOOD = projection_bytes()
COLUMNS = len(LAYERS) * HIDDEN_SIZE
NAN = torch.full((WIDTH, COLUMNS), float("nan"))

REFUSED = {
    "sha256": (draft_service(GOOD, projection_sha256="0" * 64), "features.projection_sha256: the"),
    "not safetensors": (draft_service(b"\xff" * 300), "not in safetensors format"),
    "nan": (draft_service(serialised(NAN)), "tensor fc.weight has values that are not finite"),
    "zero": (draft_service(serialised(torch.zeros(WIDTH, COLUMNS))), "fc.weight is all zero"),
    "columns": (
        draft_service(serialised(torch.ones(WIDTH, COLUMNS - 1))), "tensor fc.weight has shape",
    ),
    "name": (
        draft_service(serialise_projection(
            {"fc.weights": torch.ones(WIDTH, COLUMNS)}, layer_ids=LAYERS,
            row_dtype=torch.bfloat16, rms_norm_eps=1e-5,
        )),
        "tensor fc.weight is missing",
    ),
    "other layers": (
        draft_service(serialised(torch.ones(WIDTH, COLUMNS), layer_ids=(2, 4))),
        r"features.layer_ids: announced as \(2, 5\), the projection has \(2, 4\)",
    ),
    "other width": (
        draft_service(serialised(torch.ones(WIDTH - 1, COLUMNS))),
        "features.width: announced as 6, the projection has 5",
    ),
    "other dtype": (
        draft_service(serialised(torch.ones(WIDTH, COLUMNS), row_dtype=torch.float16)),
        "features.dtype: announced as torch.bfloat16, the projection has torch.float16",
    ),
    "too much": (
        FakeDraftService(needs=needs_of(GOOD), projection=pieces_of(bytes(300_000), 50_000)),
        "more than 65784 bytes for width 6 and 2 layers of 4",
    ),
    "layers not offered": (
        draft_service(GOOD, layer_ids=(2, 3)),
        r"features.layer_ids: the target has \[2, 4, 5\], the draft \[2, 3\]",
    ),
    "no layers": (draft_service(GOOD, layer_ids=()), "features.layer_ids"),
    "no width": (draft_service(GOOD, width=0), "features.width: the target has 1 to 65536"),
    "huge width": (draft_service(GOOD, width=2**31), "features.width"),
    "unknown dtype": (draft_service(GOOD, dtype="float32"), "features.dtype: the target has"),
    "unknown transport": (draft_service(GOOD, transport="pigeon"), "features.transport"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_a_projection_that_does_not_fit_refuses_the_link_by_name_and_the_target_goes_on(
    kind: str,
) -> None:
    service, words = REFUSED[kind]

    async def main() -> None:
        async with linked(service) as (target, _, _):
            await until(lambda: target.link.status().state == status_pb2.LINK_STATE_REFUSED)
            assert re.search(words, target.link.status().reason), target.link.status().reason
            assert target.link.status().feature_transport == "none"
            target.admit(2, 6)
            await target.finish()

    asyncio.run(main())


def test_a_process_with_a_bad_projection_is_not_listened_to_again_and_another_one_is() -> None:
    async def main() -> None:
        service = draft_service(b"\xff" * 300)
        async with linked(service) as (target, _, _):
            await until(lambda: target.link.status().state == status_pb2.LINK_STATE_REFUSED)
            # The same process is not listened to again.
            streams = service.num_streams
            await until(lambda: service.num_streams > streams)
            received = target.statistics.link_messages["received", "feature_projection"]
            await until(lambda: service.num_streams > streams + 1)
            assert target.statistics.link_messages["received", "feature_projection"] == received
            # Another one is.
            service.boot_id += 1
            service.needs, service.projection = needs_of(GOOD), pieces_of(GOOD)
            await until(lambda: is_closed_circuit(target))

    asyncio.run(main())


@pytest.mark.parametrize(
    ("projection", "words"),
    [
        ([], "no piece within 0.1 s"),
        (pieces_of(GOOD)[:1], "no piece within 0.1 s"),
        (
            [draft_pb2.LinkResponse(pong=draft_pb2.Pong())],
            "pong instead of the feature projection",
        ),
    ],
)
def test_a_projection_that_does_not_come_is_given_up_and_tried_again(
    projection: list[draft_pb2.LinkResponse], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feature_intake, "PIECE_TIMEOUT_SECONDS", 0.1)

    async def main() -> None:
        service = FakeDraftService(needs=needs_of(GOOD), projection=projection)
        async with linked(service) as (target, _, _):
            await until(lambda: words in target.link.status().reason)
            assert target.link.status().state != status_pb2.LINK_STATE_REFUSED
            service.projection = pieces_of(GOOD)
            await until(lambda: is_closed_circuit(target))

    asyncio.run(main())


def test_a_projection_that_comes_a_bit_at_a_time_is_given_up_in_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feature_intake, "PROJECTION_TIMEOUT_SECONDS", 0.2)

    class Slow(FakeDraftService):
        async def Link(self, request_iterator, context):  # type: ignore[no-untyped-def]
            async for response in super().Link(request_iterator, context):
                if response.HasField("feature_projection"):
                    await asyncio.sleep(0.15)
                yield response

    async def main() -> None:
        service = Slow(needs=needs_of(GOOD), projection=pieces_of(GOOD))
        async with linked(service) as (target, _, _):
            await until(lambda: "not complete within 0.2 s" in target.link.status().reason)

    asyncio.run(main())


def test_what_is_offered_is_in_hello_and_a_needed_part_of_it_is_captured_and_sent() -> None:
    async def main() -> None:
        service = draft_service(GOOD)
        async with linked(service) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            offer = service.hello.features
            assert list(offer.layer_ids) == list(OFFERED_LAYERS)
            assert list(offer.dtypes) == ["bfloat16", "float16"]
            assert offer.host_id == host_id()
            target.admit(4, 40)
            await target.finish()
            status = target.link.status()
            assert status.feature_transport == "inline"
            assert list(status.feature_layer_ids) == list(LAYERS)
            assert target.statistics.feature_rows["inline"] >= 4 * 30
            assert target.statistics.accepted_tokens > 80

    asyncio.run(main())


def ring_needs(name: str) -> FakeDraftService:
    return draft_service(GOOD, transport="shared_memory", shared_memory_name=name)


def test_shared_memory_is_used_where_the_draft_service_offers_it() -> None:
    reader = SharedRing.create(random_ring_name(), 2**20)

    async def main() -> None:
        async with linked(ring_needs(reader.name)) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            assert target.link.status().feature_transport == "shared_memory"
            target.admit(4, 40)
            await target.finish()
            rows = target.statistics.feature_rows["shared_memory"]
            assert rows >= 4 * 30
            assert reader.read(0, rows * ROW_BYTES)
            assert target.statistics.feature_bytes["inline"] == 0

    asyncio.run(main())
    reader.close()


@pytest.mark.parametrize("name", ["outrider-none", "../../etc/passwd", ""])
def test_shared_memory_that_is_not_there_means_inline_and_a_line_in_the_log(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with linked(ring_needs(name)) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            assert target.link.status().feature_transport == "inline"
            target.admit(2, 20)
            await target.finish()
            assert target.statistics.feature_rows["inline"] > 10

    with caplog.at_level(logging.WARNING):
        asyncio.run(main())
    assert "features go inline: shared memory cannot be attached" in caplog.text


def test_a_ring_too_small_for_the_rows_means_inline() -> None:
    reader = SharedRing.create(random_ring_name(), 8 * ROW_BYTES - 1)

    async def main() -> None:
        async with linked(ring_needs(reader.name)) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            assert target.link.status().feature_transport == "inline"

    asyncio.run(main())
    reader.close()


def test_a_target_that_wants_shared_memory_refuses_everything_else_by_name() -> None:
    async def main() -> None:
        for service, words in (
            (draft_service(GOOD), "features.transport: the target has shared_memory, the draft"),
            (ring_needs("outrider-none"), "features.shared_memory_name: cannot be attached"),
        ):
            async with linked(service, transport="shared_memory") as (target, _, _):
                await until(lambda: target.link.status().state == status_pb2.LINK_STATE_REFUSED)
                assert words in target.link.status().reason
                target.admit(1, 5)
                await target.finish()

    asyncio.run(main())


def test_a_target_that_wants_inline_names_no_host_and_attaches_nothing() -> None:
    reader = SharedRing.create(random_ring_name(), 2**20)

    async def main() -> None:
        service = ring_needs(reader.name)
        async with linked(service, transport="inline") as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            assert service.hello.features.host_id == ""
            assert target.link.status().feature_transport == "inline"

    asyncio.run(main())
    reader.close()


def test_another_head_of_the_same_process_after_a_reconnect_is_loaded_anew() -> None:
    async def main() -> None:
        service = draft_service(GOOD)
        async with linked(service) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            taps = [target.mailbox.view().features.tap]  # type: ignore[union-attr]
            for data in (GOOD, projection_bytes(seed=1)):
                service.needs, service.projection = needs_of(data), pieces_of(data)
                epoch = target.mailbox.view().stream_epoch
                service.answers_pings = False
                await until(lambda: target.mailbox.view().stream_epoch > epoch)  # noqa: B023
                service.answers_pings = True
                taps.append(target.mailbox.view().features.tap)  # type: ignore[union-attr]
            assert taps[0] is taps[1]
            assert taps[1] is not taps[2]

    asyncio.run(main())


def test_the_flags_are_checked_before_anything_is_loaded() -> None:
    assert parse_feature_layers("27, 2,15") == (2, 15, 27)
    assert parse_feature_layers("") == ()
    for text, words in (("2,x", "'x' is not a layer"), ("2,2", "layer 2 is named twice"),
                        ("-1", "'-1' is not a layer"), ("2,,3", "'' is not a layer")):  # fmt: skip
        with pytest.raises(ConfigurationError, match=words):
            parse_config(TargetConfig, "test", ["--feature-layers", text], {})
    with pytest.raises(ConfigurationError, match="feature-transport"):
        parse_config(TargetConfig, "test", ["--feature-transport", "pigeon"], {})
