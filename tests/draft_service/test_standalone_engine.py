"""The standalone drafter on the real engine, against a target with the same or other weights."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from draft_server import run, running
from link_client import Client, Row, connect, drafts_in, hello, raw_stream
from test_process import PATIENCE_SECONDS, draft_process, statuses_until
from tiny_checkpoint import EOS_TOKEN_ID, MAX_SEQUENCE_LENGTH, VOCAB_SIZE, write_checkpoint

from draft_service.drafters.pace import MAX_BACKLOG
from outrider.engine.acceptance import verify
from outrider.engine.boot import BootReport, Engine, boot
from outrider.engine.config import EngineConfig
from outrider.engine.runner import SequenceRows
from outrider.engine.sampling import Sampling, sample
from outrider.serving.tokenizer import load_tokenizer
from outrider.v1 import draft_pb2, sampling_pb2, status_pb2

PROMPTS = ([72, 101, 108, 108, 111], [1], [(7 * index) % 256 for index in range(90)])
DRAFT_LENGTH = 4


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Target and drafter have a thread each here; two teams of threads would fight for cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


class NoReport(BootReport):
    """Does not listen."""

    def enter(self, stage: str) -> None: ...
    def skip(self, stage: str, reason: str) -> None: ...
    def note(self, detail: str) -> None: ...


class Target:
    """A plain decode loop with verification: the oracle."""

    def __init__(self, engine: Engine, prompt: Sequence[int], sampling: Sampling) -> None:
        self._engine = engine
        self._sampling = sampling
        self._cached_length = 0
        blocks = -(-MAX_SEQUENCE_LENGTH // engine.limits.block_size)
        self._block_table = engine.block_pool.allocate(blocks)
        self.token_ids = list(prompt)

    def step(self, draft: Sequence[int]) -> int:
        """Verifies a draft, commits, returns the accepted length."""
        start = self._cached_length
        rows = SequenceRows(
            token_ids=[*self.token_ids[start:], *draft],
            start=start,
            block_table=self._block_table,
            num_logits=len(draft) + 1,
        )
        logits = self._engine.runner.forward([rows])
        base = len(self.token_ids)
        verdict = verify(draft, lambda index: sample(logits[index], self._sampling, base + index))
        self.token_ids.extend(verdict.emitted_token_ids(draft))
        self._cached_length = base + verdict.accepted_length
        return verdict.accepted_length


def target_engine(checkpoint: Path) -> Engine:
    return boot(
        EngineConfig(model_path=checkpoint, dtype="float32", kv_cache_bytes=1 << 22), NoReport()
    )


def fitting_hello(checkpoint: Path, **changes: object) -> draft_pb2.Hello:
    return hello(
        vocab_size=VOCAB_SIZE,
        tokenizer_sha256=load_tokenizer(checkpoint).sha256,
        eos_token_ids=[EOS_TOKEN_ID],
        **changes,
    )


async def draft_of(client: Client, rows: Sequence[Row]) -> dict[int, list[int]]:
    """Drafts for rows that ask; asked again while a prompt is still being prepared."""
    drafts = drafts_in(await client.step(*rows))
    while not all(drafts.values()):
        await asyncio.sleep(0.005)
        drafts = drafts_in(await client.step(*rows))
    return drafts


@pytest.mark.parametrize(
    "sampling", [Sampling(temperature=0.0), Sampling(temperature=0.8, top_k=50, seed=9)]
)
def test_with_the_targets_own_weights_every_draft_token_is_accepted(
    checkpoint: Path, sampling: Sampling
) -> None:
    engine = target_engine(checkpoint)
    targets = [Target(engine, prompt, sampling) for prompt in PROMPTS]
    message = sampling_pb2.SamplingParameters(
        temperature=sampling.temperature, top_k=sampling.top_k, seed=sampling.seed
    )

    async def scenario() -> None:
        async with (
            running(
                draft="standalone", draft_model=str(checkpoint), dtype="float32", kv_cache_mib=4
            ) as service,
            connect(service.address, fitting_hello(checkpoint)) as client,
        ):
            await client.open(*enumerate(PROMPTS), sampling=message)
            commit_counts = [0] * len(targets)
            for _ in range(8):
                rows = [
                    Row(slot, target.token_ids, commit_counts[slot], DRAFT_LENGTH)
                    for slot, target in enumerate(targets)
                ]
                drafts = await draft_of(client, rows)
                for slot, target in enumerate(targets):
                    draft = drafts[slot]
                    # An end token ends a draft early; this target goes on behind it.
                    assert len(draft) == DRAFT_LENGTH or draft[-1] == EOS_TOKEN_ID
                    assert target.step(draft) == len(draft)
                    commit_counts[slot] = len(draft) + 1
            assert client.seen == []

    run(scenario())


def test_another_models_drafts_never_change_what_is_emitted(
    checkpoint: Path, tmp_path: Path
) -> None:
    sampling = Sampling(temperature=0.8, seed=4)
    other = write_checkpoint(tmp_path / "other", seed=1)
    engine = target_engine(checkpoint)
    plain = Target(engine, PROMPTS[0], sampling)
    while len(plain.token_ids) < 60:
        plain.step([])
    target = Target(engine, PROMPTS[0], sampling)

    async def scenario() -> None:
        message = sampling_pb2.SamplingParameters(temperature=0.8, seed=4)
        async with (
            running(draft="standalone", draft_model=str(other), dtype="float32") as service,
            connect(service.address, fitting_hello(checkpoint)) as client,
        ):
            await client.open((0, target.token_ids), sampling=message)
            commit_count = 0
            while len(target.token_ids) < 60:
                rows = [Row(0, target.token_ids, commit_count, DRAFT_LENGTH)]
                commit_count = target.step((await draft_of(client, rows))[0]) + 1

    run(scenario())
    assert target.token_ids[:60] == plain.token_ids[:60]


def test_a_draft_asked_for_right_after_a_short_open_does_not_wait_for_preparation(
    checkpoint: Path,
) -> None:
    async def scenario() -> None:
        async with (
            running(draft="standalone", draft_model=str(checkpoint), kv_cache_mib=4) as service,
            connect(service.address, fitting_hello(checkpoint)) as client,
        ):
            text = list(range(MAX_BACKLOG))
            await client.open((0, text))
            assert len(drafts_in(await client.step(Row(0, text, 0)))[0]) == DRAFT_LENGTH

    run(scenario())


def test_a_process_with_a_model_boots_all_stages_and_refuses_another_tokenizer(
    checkpoint: Path,
) -> None:
    flags = ("--draft", "standalone", "--draft-model", str(checkpoint), "--kv-cache-mib", "4")
    with draft_process(*flags, "--model", str(checkpoint)) as (process, address):

        async def scenario() -> None:
            status = (await statuses_until(address, status_pb2.SERVICE_STATE_SERVING))[-1]
            assert [stage.name for stage in status.stages] == [
                "config", "weights", "kv_cache", "attention", "graphs", "first_decode",
            ]  # fmt: skip
            assert status.model_fingerprint
            assert status.device == "cpu"
            assert int(status.limits["kv_blocks"]) > 0
            assert status.limits["max_sequence_length"] == str(MAX_SEQUENCE_LENGTH)
            assert status.limits["first_draft"].startswith("proposed ")
            async with raw_stream(address) as call:
                message = fitting_hello(checkpoint)
                message.identity.tokenizer_sha256 = "b" * 64
                reply = await Client(call=call, hello=message).shake_hands()
                assert reply.refusal.field == "identity.tokenizer_sha256"
                assert reply.fingerprint == status.model_fingerprint

        run(scenario())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


def test_a_model_with_another_tokenizer_than_the_targets_fails_in_stage_config(
    checkpoint: Path, tmp_path: Path
) -> None:
    other = write_checkpoint(tmp_path / "other", end_token="<end>")
    flags = ("--draft", "standalone", "--draft-model", str(other), "--model", str(checkpoint))
    with draft_process(*flags, "--on-startup-failure", "hold") as (_, address):
        failure = run(statuses_until(address, status_pb2.SERVICE_STATE_FAILED))[-1].failure
        assert failure.stage == "config"
        assert "must be the tokenizer" in failure.reason
