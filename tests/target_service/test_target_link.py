"""Step loop, link and a draft service whose answers are bent: speed may change, tokens never."""

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, nullcontext

import grpc
import numpy as np
import pytest
import torch
from fake_draft_service import FakeDraftService
from fake_engine import HIDDEN_SIZE, VOCAB_SIZE, FakeRunner, FakeSteps, oracle
from test_step_loop import Collector

from outrider.engine.feature_projection import load_projection
from outrider.engine.kv_cache import BlockPool
from outrider.engine.sampling import Sampling
from outrider.v1 import draft_pb2, draft_pb2_grpc, status_pb2
from target_service.draft_link import DraftLink
from target_service.draft_wait import DraftWait
from target_service.feature_intake import FeatureIntake
from target_service.link_mailbox import LinkMailbox
from target_service.linked_drafts import LinkedDrafts
from target_service.policy import Policy
from target_service.scheduler import Scheduler, SchedulerBounds
from target_service.sequence import Request
from target_service.statistics import Statistics
from target_service.step_loop import StepLoop

BOOT_ID = 99
DRAFT_LENGTH = 4
STEP_SECONDS = 0.004
NUM_BLOCKS = 256
OFFERED_LAYERS = (2, 4, 5)


class SlowRunner(FakeRunner):
    """Takes as long as a small model would, so that time limits mean something."""

    def forward(self, batch, tap=None):  # type: ignore[no-untyped-def]
        time.sleep(STEP_SECONDS)
        return super().forward(batch, tap)


class Target:
    """The target's inside with a real link, and the fake model for an engine."""

    def __init__(self, address: str, num_slots: int = 8, transport: str = "auto") -> None:
        runner = SlowRunner(8, 64)
        self.statistics = Statistics(DRAFT_LENGTH)
        self.statuses: list[status_pb2.LinkStatus] = []
        self.mailbox = LinkMailbox(self.statistics)
        self.link = DraftLink(
            address=address,
            hello=draft_pb2.Hello(target_boot_id=BOOT_ID, max_draft_length=DRAFT_LENGTH),
            intake=FeatureIntake(
                layer_ids=OFFERED_LAYERS,
                hidden_size=HIDDEN_SIZE,
                transport=transport,
                load=lambda data: runner.make_tap(
                    load_projection(data, hidden_size=HIDDEN_SIZE, dtype=torch.float32), NUM_BLOCKS
                ),
            ),
            mailbox=self.mailbox,
            statistics=self.statistics,
            on_status=self.statuses.append,
        )
        self.drafts = LinkedDrafts(
            mailbox=self.mailbox,
            send=self.link.send,
            num_unsent=self.link.num_unsent,
            target_boot_id=BOOT_ID,
            num_slots=num_slots,
            vocab_size=VOCAB_SIZE,
            wait=DraftWait([(1, STEP_SECONDS), (64, 2 * STEP_SECONDS)]),
            statistics=self.statistics,
        )
        self.scheduler = Scheduler(
            BlockPool(NUM_BLOCKS),
            SchedulerBounds(
                max_running_sequences=num_slots,
                max_waiting_sequences=64,
                max_step_rows=64,
                max_prefill_rows=16,
                block_size=8,
                caches_prefixes=True,
            ),
            on_preempt=self.drafts.stopped,
        )
        self.loop = StepLoop(
            engine=FakeSteps(runner),
            ahead=None,
            scheduler=self.scheduler,
            drafts=self.drafts,
            statistics=self.statistics,
            max_step_rows=64,
            activity=lambda name: nullcontext(),
        )
        self.sink = Collector()
        self.set_policy(Policy(rules=((64, DRAFT_LENGTH),)))
        self.expected: dict[int, list[int]] = {}

    def set_policy(self, policy: Policy) -> None:
        self.loop.submit(lambda loop: loop.set_policy(policy))

    def admit(self, num_sequences: int, max_tokens: int) -> None:
        requests = []
        for _ in range(num_sequences):
            sequence_id = len(self.expected)
            prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randrange(1, 12))]
            sampling = Sampling(temperature=random.choice([0.0, 0.8]), seed=sequence_id)
            self.expected[sequence_id] = oracle(prompt, sampling, max_tokens)
            requests.append(
                Request(
                    sink=self.sink, sequence_id=sequence_id, prompt_token_ids=tuple(prompt),
                    resumed_output_token_ids=(), max_tokens=max_tokens, sampling=sampling,
                    stop_token_ids=frozenset(), deadline=None, priority=0,
                    draft_length_override=None,
                    patience_seconds=0.0,
                )
            )  # fmt: skip
        self.loop.submit(lambda loop: loop.admit(requests))

    async def finish(self, timeout_seconds: float = 20) -> None:
        async with asyncio.timeout(timeout_seconds):
            while sum(map(len, map(self.tokens, self.expected))) < sum(
                map(len, self.expected.values())
            ):
                await asyncio.sleep(0.005)
        assert {key: self.tokens(key) for key in self.expected} == self.expected

    def tokens(self, sequence_id: int) -> list[int]:
        return self.sink.tokens(sequence_id) if sequence_id in self.sink.outcomes else []


async def until(condition: Callable[[], bool], timeout_seconds: float = 10) -> None:
    async with asyncio.timeout(timeout_seconds):
        while not condition():
            await asyncio.sleep(0.005)


async def serve(service: FakeDraftService, port: int = 0) -> tuple[grpc.aio.Server, int]:
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    draft_pb2_grpc.add_DraftServiceServicer_to_server(service, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    return server, port


@asynccontextmanager
async def linked(
    service: FakeDraftService, transport: str = "auto"
) -> AsyncIterator[tuple[Target, grpc.aio.Server, int]]:
    random.seed(3)
    server, port = await serve(service)
    target = Target(f"127.0.0.1:{port}", transport=transport)
    link = asyncio.create_task(target.link.run())
    threading.Thread(target=target.loop.run, daemon=True).start()
    try:
        yield target, server, port
    finally:
        link.cancel()
        await server.stop(None)


def is_closed_circuit(target: Target) -> bool:
    return target.link.status().state == status_pb2.LINK_STATE_CLOSED_CIRCUIT


def test_right_drafts_over_the_link_are_accepted_whole() -> None:
    async def main() -> None:
        service = FakeDraftService()
        async with linked(service) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            target.admit(4, 41)
            await target.finish()
            statistics = target.statistics
            assert statistics.accepted_tokens == statistics.draft_tokens > 80
            # On a busy machine a draft may come late; none is wrong.
            assert set(+statistics.draft_rows_dropped) <= {"late", "base_length"}
            await until(lambda: not service.held)

    asyncio.run(main())


def test_kinds_of_wrong_rows_are_dropped_by_reason_and_change_no_token() -> None:
    def bent(field: str, dtype: str, change: Callable[[np.ndarray], np.ndarray]):  # type: ignore[no-untyped-def]
        def bend(draft: draft_pb2.Draft) -> draft_pb2.Draft:
            values = np.frombuffer(getattr(draft, field), dtype).copy()
            setattr(draft, field, change(values).astype(dtype).tobytes())
            return draft

        return bend

    def first(value: int) -> Callable[[np.ndarray], np.ndarray]:
        def change(values: np.ndarray) -> np.ndarray:
            values[0] = value
            return values

        return change

    def epoch(draft: draft_pb2.Draft) -> draft_pb2.Draft:
        draft.stream_epoch += 1
        return draft

    cases = {
        "slot": bent("slots", "<u4", first(2**32 - 1)),
        "generation": bent("generations", "<u4", lambda values: values + 1),
        "base_length": bent("base_lengths", "<u4", lambda values: values - 1),
        "prefix_hash": bent("prefix_hashes", "<u8", lambda values: values ^ np.uint64(1)),
        "token_range": bent("token_ids", "<i4", first(VOCAB_SIZE)),
        "malformed": bent("token_counts", "<u1", first(200)),
        "epoch": epoch,
    }

    async def main() -> None:
        for reason, bend in cases.items():
            async with linked(FakeDraftService(bend=bend)) as (target, _, _):
                await until(lambda target=target: is_closed_circuit(target))  # type: ignore[misc]
                target.admit(3, 12)
                await target.finish()
                assert target.statistics.draft_rows_dropped[reason] > 0, reason

    asyncio.run(main())


def test_a_negative_token_id_is_out_of_range_and_only_its_row_suffers() -> None:
    def bend(draft: draft_pb2.Draft) -> draft_pb2.Draft:
        values = np.frombuffer(draft.token_ids, "<i4").copy()
        values[0] = -1
        draft.token_ids = values.tobytes()
        return draft

    async def main() -> None:
        async with linked(FakeDraftService(bend=bend)) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            target.admit(3, 12)
            await target.finish()
            assert target.statistics.draft_rows_dropped["token_range"] > 0
            assert target.statistics.accepted_tokens > 0

    asyncio.run(main())


def test_many_unusable_rows_open_the_circuit() -> None:
    def bend(draft: draft_pb2.Draft) -> draft_pb2.Draft:
        draft.token_ids = bytes(np.full(len(draft.token_ids) // 4, -5, "<i4"))
        return draft

    async def main() -> None:
        async with linked(FakeDraftService(bend=bend)) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            target.admit(4, 400)  # seldom asked, since none of it is accepted
            await until(lambda: "unusable" in target.link.status().reason)
            await target.finish()

    asyncio.run(main())


def test_a_draft_service_that_is_killed_and_comes_back_is_used_again() -> None:
    async def main() -> None:
        service = FakeDraftService()
        async with linked(service) as (target, server, port):
            await until(lambda: is_closed_circuit(target))
            target.admit(8, 400)
            await until(lambda: target.statistics.accepted_tokens > 100)
            await server.stop(None)
            await until(lambda: not target.mailbox.view().stream_epoch)
            plain = target.statistics.plain_steps
            await until(lambda: target.statistics.plain_steps > plain + 5)
            accepted = target.statistics.accepted_tokens
            second, _ = await serve(FakeDraftService(boot_id=8), port)
            await until(lambda: target.statistics.accepted_tokens > accepted + 100)
            await target.finish()
            assert target.mailbox.view().stream_epoch > 1
            await second.stop(None)

    asyncio.run(main())


def test_a_draft_service_that_falls_silent_is_given_up_within_the_silence_limit() -> None:
    async def main() -> None:
        service = FakeDraftService()
        async with linked(service) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            service.answers_pings = False
            service.bend = lambda draft: None
            target.admit(2, 30)
            started = time.monotonic()
            await target.finish()
            assert time.monotonic() - started < 2
            await until(lambda: service.num_streams > 1, 5)
            assert any("silent" in status.reason for status in target.statuses)

    asyncio.run(main())


def test_late_drafts_open_the_circuit_and_timely_ones_close_it_again() -> None:
    async def main() -> None:
        service = FakeDraftService(delay_seconds=0.2)
        async with linked(service) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            target.admit(2, 1500)
            await until(lambda: target.statistics.bypass_steps["circuit_open"] > 0)
            assert "late" in target.link.status().reason
            service.delay_seconds = 0.0
            await until(lambda: target.statistics.accepted_tokens > 100)
            assert is_closed_circuit(target)
            await target.finish(30)

    asyncio.run(main())


def test_a_refused_handshake_names_the_field_and_both_values() -> None:
    async def main() -> None:
        refusal = draft_pb2.Refusal(
            field="identity.vocab_size", target_value="24", draft_value="25"
        )
        async with linked(FakeDraftService(refusal=refusal)) as (target, _, _):
            await until(lambda: target.link.status().state == status_pb2.LINK_STATE_REFUSED)
            assert target.link.status().reason == (
                "identity.vocab_size: the target has 24, the draft 25"
            )
            target.admit(1, 5)
            await target.finish()

    asyncio.run(main())


def test_a_draft_service_that_forgot_is_told_everything_again() -> None:
    async def main() -> None:
        service = FakeDraftService()
        async with linked(service) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            target.admit(4, 200)
            await until(lambda: target.statistics.accepted_tokens > 50)
            service.forgets = True
            await until(lambda: target.statistics.link_messages["received", "resync"] > 0)
            accepted = target.statistics.accepted_tokens
            await until(lambda: target.statistics.accepted_tokens > accepted + 50)
            await target.finish()

    asyncio.run(main())


def test_above_the_threshold_only_pings_cross_the_link() -> None:
    async def main() -> None:
        async with linked(FakeDraftService()) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            target.set_policy(Policy(rules=((64, DRAFT_LENGTH),), max_decode_rows=2))
            target.admit(3, 150)
            await until(lambda: len(target.tokens(2)) > 3)
            before = dict(target.statistics.link_messages)
            await asyncio.sleep(0.25)
            assert len(target.tokens(2)) < 150
            after = dict(target.statistics.link_messages)
            moved = {kind for kind in after if before.get(kind) != after[kind]}
            assert moved == {("sent", "ping"), ("received", "ping")}
            await target.finish()
            target.admit(2, 30)
            accepted = target.statistics.accepted_tokens
            await target.finish()
            assert target.statistics.accepted_tokens > accepted

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_random_bytes_in_every_column_change_no_token(seed: int) -> None:
    generator = random.Random(seed)
    fields = (
        "slots", "generations", "base_lengths", "prefix_hashes", "token_counts", "token_ids",
        "parents", "case_accepted_lengths", "case_next_token_ids",
    )  # fmt: skip

    def bend(draft: draft_pb2.Draft) -> draft_pb2.Draft:
        for field in fields:
            if generator.random() < 0.2:
                length = generator.choice([len(getattr(draft, field)), generator.randrange(40)])
                setattr(draft, field, generator.randbytes(length))
        return draft

    async def main() -> None:
        async with linked(FakeDraftService(bend=bend)) as (target, _, _):
            await until(lambda: is_closed_circuit(target))
            target.admit(6, 40)
            await target.finish()

    asyncio.run(main())


def test_streams_that_end_while_they_are_written_to_never_end_the_link() -> None:
    """A draft service that dies in the middle of a message is an ordinary event, hundreds of
    times.
    """

    class Leaving(FakeDraftService):
        async def Link(self, request_iterator, context):  # type: ignore[no-untyped-def]
            self.num_streams += 1
            async for request in request_iterator:
                if request.HasField("hello"):
                    yield draft_pb2.LinkResponse(hello=self._reply(request.hello))
                else:
                    return

    async def main() -> None:
        service = Leaving()
        async with linked(service) as (target, _, _):
            pings = draft_pb2.LinkRequest(ping=draft_pb2.Ping())
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                epoch = target.mailbox.view().stream_epoch
                if epoch:
                    target.link.send(epoch, [pings] * 20)
                await asyncio.sleep(0.001)
            assert service.num_streams > 10
            service.__class__ = FakeDraftService
            await until(lambda: is_closed_circuit(target))
            target.admit(2, 20)
            await target.finish()
            await until(lambda: is_closed_circuit(target))

    asyncio.run(main())
