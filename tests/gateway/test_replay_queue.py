"""Sequences between two targets: batchers with streams that only note what is sent."""

import asyncio

import pytest

from gateway.batcher import Batcher, BatcherLimits
from gateway.model import ServedModel
from gateway.replay import ReplayLimits, ReplayQueue
from gateway.request import GenerationRequest
from gateway.stats import Statistics
from gateway.step import SequenceStep
from outrider.serving.columns import unpack
from outrider.serving.errors import NotServing
from outrider.serving.sampling_parameters import SamplingParameters
from outrider.v1 import generation_pb2, target_pb2


class NotingStream:
    def __init__(self) -> None:
        self.admitted: list[target_pb2.Admit] = []

    def admit(self, sequences) -> None:
        self.admitted.extend(sequences)

    def cancel(self, sequence_ids) -> None:
        pass


class TwoTargets:
    """A gateway's part between targets: each `next_target` is one after the other's loss."""

    def __init__(self, *, max_replays: int = 3, timeout: float = 10.0, in_flight: int = 10) -> None:
        self.replays = ReplayQueue(ReplayLimits(max_replays=max_replays, timeout_seconds=timeout))
        self._limits = BatcherLimits(window_seconds=0, max_waiting=10, max_in_flight=in_flight)

    def next_target(self, fingerprint: str = "f", dtype: str = "float32"):
        stream = NotingStream()
        batcher = Batcher(
            stream=stream, limits=self._limits, statistics=Statistics(), replays=self.replays
        )
        model = ServedModel(
            name="m", vocab_size=9, max_sequence_length=99, max_running_sequences=9,
            max_draft_length=0, fingerprint=fingerprint, info=target_pb2.ModelInfo(dtype=dtype),
        )  # fmt: skip
        batcher.resume(self.replays.release(model))
        return batcher, stream


def request(**options) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        max_tokens=8,
        sampling=SamplingParameters(seed=77, temperature=0.8),
        seed=77,
        **options,
    )


def step(*token_ids: int, finish: int = 0, cached: int = 0) -> SequenceStep:
    return SequenceStep(
        token_ids=token_ids,
        drafted_length=0,
        accepted_length=0,
        finish_reason=finish,
        cached_prompt_length=cached,
    )


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_the_next_target_is_told_the_output_so_far_and_the_reader_sees_one_sequence():
    async def run():
        targets = TwoTargets()
        batcher, _ = targets.next_target()
        sequence = batcher.submit(request(stop_token_ids=(5,), priority=2))
        await turn()
        batcher.stepped([(1, step(3, 4, cached=2))])
        batcher.lost("killed")
        assert targets.replays.waiting_count == 1
        batcher, stream = targets.next_target()
        await turn()
        (admit,) = stream.admitted
        assert unpack("prompt", admit.prompt_token_ids, "<i4") == [1, 2]
        assert unpack("resumed", admit.resumed_output_token_ids, "<i4") == [3, 4]
        assert (admit.max_tokens, admit.sampling.seed, admit.priority) == (8, 77, 2)
        assert list(admit.stop_token_ids) == [5]
        batcher.stepped([(admit.sequence_id, step(6, finish=1, cached=2))])
        steps = await sequence.take()
        assert [list(one.token_ids) for one in steps] == [[3, 4], [6]]
        assert [one.cached_prompt_length for one in steps] == [2, 0]
        assert targets.replays.replayed == 1
        assert targets.replays.waiting_count == batcher.running_count == 0

    asyncio.run(run())


def test_those_who_were_accepted_before_go_first_and_a_full_target_gets_no_more_than_it_takes():
    async def run():
        targets = TwoTargets(in_flight=2)
        batcher, _ = targets.next_target()
        old = [batcher.submit(request()) for _ in range(3)]
        await turn()
        batcher.lost("killed")
        batcher, stream = targets.next_target()
        new = batcher.submit(request())
        await turn()
        assert [one.sequence_id for one in stream.admitted] == [
            old[0].sequence_id,
            old[1].sequence_id,
        ]
        batcher.stepped([(one.sequence_id, step(1, finish=1)) for one in old[:2]])
        assert [one.sequence_id for one in stream.admitted[2:]] == [
            old[2].sequence_id,
            new.sequence_id,
        ]
        # Only what ran can have been the cause, and only that counts as replayed.
        assert [one.losses for one in old] == [1, 1, 0]
        assert targets.replays.replayed == 2

    asyncio.run(run())


def test_a_request_that_kills_every_target_is_given_up_after_its_attempts():
    async def run():
        targets = TwoTargets(max_replays=2)
        batcher, _ = targets.next_target()
        sequence = batcher.submit(request())
        await turn()
        for _ in range(2):
            batcher.lost("killed by signal 9")
            assert not sequence.is_ended
            batcher, _ = targets.next_target()
            await turn()
            assert batcher.running_count == 1
        batcher.lost("killed by signal 9")
        with pytest.raises(NotServing, match="signal 9; given up after 2 replays"):
            await sequence.take()
        assert targets.replays.given_up["attempts"] == 1
        assert targets.next_target()[0].waiting_count == 0

    asyncio.run(run())


def test_the_wait_for_the_next_target_is_bounded():
    async def run():
        targets = TwoTargets(timeout=0.05)
        batcher, _ = targets.next_target()
        sequence = batcher.submit(request())
        await turn()
        batcher.lost("killed")
        with pytest.raises(NotServing, match=r"killed; none came back within 0\.05 s"):
            await asyncio.wait_for(sequence.take(), 5)
        assert targets.replays.waiting_count == 0
        assert targets.replays.given_up["timeout"] == 1

    asyncio.run(run())


def test_a_deadline_goes_on_counting_between_two_targets():
    async def run():
        targets = TwoTargets()
        batcher, _ = targets.next_target()
        short = batcher.submit(request(deadline_seconds=0.05))
        long = batcher.submit(request(deadline_seconds=9.0))
        await turn()
        batcher.lost("killed")
        (last,) = await asyncio.wait_for(short.take(), 5)
        assert last.finish_reason == generation_pb2.FINISH_REASON_DEADLINE
        _, stream = targets.next_target()
        await turn()
        (admit,) = stream.admitted
        assert admit.sequence_id == long.sequence_id
        assert 0 < admit.deadline_seconds < 8.96

    asyncio.run(run())


@pytest.mark.parametrize("other", [{"fingerprint": "g"}, {"dtype": "bfloat16"}])
def test_a_target_that_computes_otherwise_does_not_go_on_with_the_text(other):
    async def run():
        targets = TwoTargets()
        batcher, _ = targets.next_target()
        sequence = batcher.submit(request())
        await turn()
        batcher.lost("killed")
        batcher, stream = targets.next_target(**other)
        await turn()
        assert stream.admitted == []
        with pytest.raises(NotServing, match=next(iter(other.values()))):
            await sequence.take()
        # Requests that are new to it are its own.
        later = batcher.submit(request())
        await turn()
        batcher.lost("killed")
        _, stream = targets.next_target(**other)
        await turn()
        assert [one.sequence_id for one in stream.admitted] == [later.sequence_id]

    asyncio.run(run())


def test_a_client_that_leaves_meanwhile_is_not_replayed():
    async def run():
        targets = TwoTargets()
        batcher, _ = targets.next_target()
        sequence = batcher.submit(request())
        await turn()
        batcher.lost("killed")
        sequence.cancel()
        sequence.cancel()
        _, stream = targets.next_target()
        await turn()
        assert stream.admitted == [] and targets.replays.waiting_count == 0

    asyncio.run(run())


def test_a_next_target_that_cannot_hold_the_text_is_no_fault_of_the_request():
    async def run():
        targets = TwoTargets()
        batcher, _ = targets.next_target()
        sequence = batcher.submit(request())
        await turn()
        batcher.stepped([(1, step(3))])
        batcher.lost("killed")
        batcher, _ = targets.next_target()
        await turn()
        batcher.rejected(sequence.sequence_id, target_pb2.REJECT_REASON_INVALID, "max_tokens")
        await sequence.take()
        with pytest.raises(NotServing, match="cannot go on with the answer: max_tokens"):
            await sequence.take()

    asyncio.run(run())


def test_a_gateway_that_stops_waits_for_no_target():
    async def run():
        targets = TwoTargets()
        batcher, _ = targets.next_target()
        early, late = batcher.submit(request()), batcher.submit(request())
        await turn()
        batcher.stepped([(late.sequence_id, step(3))])
        batcher.rejected(early.sequence_id, target_pb2.REJECT_REASON_DRAINING, "")
        targets.replays.close("the gateway stops")
        batcher.lost("the gateway stops")
        await late.take()
        for sequence in (early, late):
            with pytest.raises(NotServing, match="the gateway stops"):
                await sequence.take()
        assert targets.replays.given_up["stopped"] == 2

    asyncio.run(run())


@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_request_that_kills_every_target_takes_none_of_its_neighbours_with_it(place):
    async def run():
        targets = TwoTargets(max_replays=3)
        batcher, _ = targets.next_target()
        sequences = [batcher.submit(request()) for _ in range(5)]
        poison = sequences.pop(place)
        lost_targets = 0
        for _ in range(40):
            await turn()
            if all(one.is_ended for one in (poison, *sequences)):
                break
            running = [
                one for one in (poison, *sequences) if batcher.is_running(one) and not one.is_ended
            ]
            if lost_targets >= 2:
                assert sum(one.is_suspect for one in running) == 1
            if poison in running:
                lost_targets += 1
                batcher.lost("killed by signal 9")
                batcher, _ = targets.next_target()
            else:
                batcher.stepped([(one.sequence_id, step(1, finish=1)) for one in running])
        with pytest.raises(NotServing, match="given up after 3 replays"):
            await poison.take()
        for one in sequences:
            assert (await one.take())[-1].finish_reason == 1
        assert lost_targets == 4

    asyncio.run(run())


def test_a_suspect_that_is_refused_makes_room_for_the_next_one():
    async def run():
        targets = TwoTargets()
        batcher, _ = targets.next_target()
        first, second = batcher.submit(request()), batcher.submit(request())
        for _ in range(2):
            await turn()
            batcher.lost("killed")
            batcher, _ = targets.next_target()
        await turn()
        assert batcher.is_running(first) and not batcher.is_running(second)
        # Whoever is no suspect does not wait for them.
        fresh = batcher.submit(request())
        await turn()
        assert batcher.is_running(fresh) and not batcher.is_running(second)
        batcher.rejected(first.sequence_id, target_pb2.REJECT_REASON_INVALID, "max_tokens")
        assert batcher.is_running(second)

    asyncio.run(run())
