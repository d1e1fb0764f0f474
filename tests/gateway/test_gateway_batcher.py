"""The batcher with a stream that only notes what is sent."""

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.batcher import Batcher, BatcherLimits, RefusedByTarget
from gateway.replay import ReplayLimits, ReplayQueue
from gateway.request import GenerationRequest
from gateway.stats import CompletionRate, Statistics
from gateway.step import SequenceStep
from outrider.serving.errors import NotServing, Overloaded
from outrider.serving.sampling_parameters import SamplingParameters
from outrider.v1 import generation_pb2, target_pb2


class NotingStream:
    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.messages: list[target_pb2.Admit] = []
        self.cancelled: list[int] = []

    def admit(self, sequences) -> None:
        self.batches.append([one.sequence_id for one in sequences])
        self.messages.extend(sequences)

    def cancel(self, sequence_ids) -> None:
        self.cancelled.extend(sequence_ids)

    @property
    def admitted(self) -> list[int]:
        return [sequence_id for batch in self.batches for sequence_id in batch]


def request(deadline: float = 0.0) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt_token_ids=[1, 2],
        max_tokens=4,
        sampling=SamplingParameters(seed=1),
        seed=1,
        deadline_seconds=deadline,
    )


def batcher_with(
    *,
    window: float = 0.0,
    waiting: int = 100,
    in_flight: int = 100,
    queue_timeout: float = 0.0,
    max_replays: int = 0,
) -> tuple[Batcher, NotingStream]:
    stream = NotingStream()
    limits = BatcherLimits(
        window_seconds=window,
        max_waiting=waiting,
        max_in_flight=in_flight,
        queue_timeout_seconds=queue_timeout,
    )
    replays = ReplayQueue(ReplayLimits(max_replays=max_replays, timeout_seconds=10))
    return Batcher(stream=stream, limits=limits, statistics=Statistics(), replays=replays), stream


def step(*token_ids: int, finish: int = 0) -> SequenceStep:
    return SequenceStep(
        token_ids=token_ids, drafted_length=0, accepted_length=0, finish_reason=finish
    )


async def turn() -> None:
    """Lets the loop run what is scheduled."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


def test_requests_of_one_moment_are_admitted_together():
    async def run():
        batcher, stream = batcher_with()
        for _ in range(3):
            batcher.submit(request())
        await turn()
        assert stream.batches == [[1, 2, 3]]

    asyncio.run(run())


def test_without_a_window_a_request_is_sent_at_once():
    async def run():
        batcher, stream = batcher_with()
        batcher.submit(request())
        await turn()
        batcher.submit(request())
        await turn()
        assert stream.batches == [[1], [2]]

    asyncio.run(run())


def test_a_window_waits_for_others():
    async def run():
        batcher, stream = batcher_with(window=0.05)
        batcher.submit(request())
        await asyncio.sleep(0.01)
        batcher.submit(request())
        assert stream.batches == []
        await asyncio.sleep(0.06)
        assert stream.batches == [[1, 2]]

    asyncio.run(run())


def test_a_sequence_that_is_refused_in_mid_answer_keeps_its_tokens_and_frees_its_place():
    async def run():
        batcher, stream = batcher_with(in_flight=1)
        first = batcher.submit(request())
        batcher.submit(request())
        await turn()
        batcher.stepped([(1, step(5, 6))])
        batcher.rejected(1, target_pb2.REJECT_REASON_INVALID, "structured_output is too costly")
        assert stream.batches == [[1], [2]]
        assert [one.token_ids for one in await first.take()] == [(5, 6)]
        with pytest.raises(RefusedByTarget, match="too costly"):
            await first.take()

    asyncio.run(run())


def test_a_sequence_that_ends_does_not_cut_a_window_short():
    async def run():
        batcher, stream = batcher_with(window=0.03)
        batcher.submit(request())
        await asyncio.sleep(0.04)
        batcher.submit(request())
        batcher.stepped([(1, step(5, finish=1))])
        assert stream.batches == [[1]]
        await asyncio.sleep(0.04)
        assert stream.batches == [[1], [2]]

    asyncio.run(run())


def test_a_full_queue_is_refused_with_a_time_to_come_back():
    async def run():
        batcher, _ = batcher_with(waiting=2, in_flight=1)
        batcher.submit(request())
        await turn()
        batcher.submit(request())
        batcher.submit(request())
        with pytest.raises(Overloaded) as caught:
            batcher.submit(request())
        assert caught.value.retry_after_seconds >= 1
        assert "2" in str(caught.value)

    asyncio.run(run())


def test_the_gateways_own_requests_pass_a_full_queue():
    async def run():
        batcher, stream = batcher_with(waiting=1, in_flight=1)
        batcher.submit(request())
        await turn()
        batcher.submit(request())
        own = batcher.submit_first(request())
        assert stream.admitted == [1, own.sequence_id]

    asyncio.run(run())


def test_a_place_that_gets_free_is_taken_at_once():
    async def run():
        batcher, stream = batcher_with(in_flight=1)
        batcher.submit(request())
        batcher.submit(request())
        await turn()
        assert stream.admitted == [1]
        batcher.stepped([(1, step(7, finish=1))])
        assert stream.admitted == [1, 2]

    asyncio.run(run())


def test_a_target_without_a_place_is_asked_again_and_the_order_is_kept():
    async def run():
        batcher, stream = batcher_with()
        first = batcher.submit(request())
        await turn()
        batcher.rejected(1, target_pb2.REJECT_REASON_OVERLOADED, "full")
        batcher.submit(request())
        await turn()
        assert stream.batches == [[1]]
        assert not first.is_ended
        await asyncio.sleep(0.15)
        assert stream.batches == [[1], [1, 2]]

    asyncio.run(run())


def test_a_refusal_of_the_target_reaches_its_request_only():
    async def run():
        batcher, _ = batcher_with()
        refused, other = batcher.submit(request()), batcher.submit(request())
        await turn()
        batcher.rejected(1, target_pb2.REJECT_REASON_INVALID, "max_tokens is 7, must be 6")
        with pytest.raises(RefusedByTarget, match="must be 6"):
            await refused.take()
        batcher.stepped([(2, step(9))])
        assert [one.token_ids for one in await other.take()] == [(9,)]

    asyncio.run(run())


def test_a_request_that_a_draining_target_rejects_waits_for_its_successor_and_is_not_suspect():
    async def run():
        batcher, _ = batcher_with(max_replays=1)
        sequence = batcher.submit(request())
        await turn()
        batcher.rejected(1, target_pb2.REJECT_REASON_DRAINING, "the target is draining")
        assert batcher.running_count == 0
        assert not sequence.is_ended and sequence.losses == 0
        sequence.cancel()

    asyncio.run(run())


def test_a_request_is_refused_after_its_time_in_the_queue_and_a_running_one_is_not():
    async def run():
        batcher, stream = batcher_with(in_flight=1, queue_timeout=0.05)
        running, waiting = batcher.submit(request()), batcher.submit(request())
        with pytest.raises(Overloaded, match=r"0\.05 s in the queue") as caught:
            await asyncio.wait_for(waiting.take(), 5)
        assert caught.value.retry_after_seconds >= 1
        assert stream.admitted == [1] and not running.is_ended
        assert batcher.waiting_count == 0

    asyncio.run(run())


def test_a_deadline_counts_from_the_request_and_ends_one_that_still_waits():
    async def run():
        batcher, stream = batcher_with(in_flight=1)
        first = batcher.submit(request())
        waiting, late = batcher.submit(request(deadline=9.0)), batcher.submit(request(0.05))
        (last,) = await asyncio.wait_for(late.take(), 5)
        assert last.finish_reason == generation_pb2.FINISH_REASON_DEADLINE
        batcher.stepped([(1, step(7, finish=1))])
        assert first.is_ended and not waiting.is_ended
        assert stream.admitted == [1, 2]
        # The time in the queue is part of it.
        assert stream.messages[1].deadline_seconds < 8.96

    asyncio.run(run())


def test_cancelling_tells_the_target_once_and_only_for_what_runs():
    async def run():
        batcher, stream = batcher_with(in_flight=1)
        running, waiting = batcher.submit(request()), batcher.submit(request())
        await turn()
        batcher.cancel(waiting)
        batcher.cancel(running)
        batcher.cancel(running)
        assert stream.cancelled == [1]
        assert (batcher.running_count, batcher.waiting_count) == (0, 0)
        batcher.stepped([(1, step(5))])

    asyncio.run(run())


def test_without_replays_a_lost_stream_ends_what_ran_with_its_reason_and_takes_nothing_new():
    async def run():
        batcher, _ = batcher_with()
        sequence = batcher.submit(request())
        await turn()
        batcher.stepped([(1, step(5))])
        batcher.lost("the cable")
        # What had come before is not lost.
        assert len(await sequence.take()) == 1
        with pytest.raises(NotServing, match="the cable"):
            await sequence.take()
        with pytest.raises(NotServing, match="the cable"):
            batcher.submit(request())

    asyncio.run(run())


def test_steps_pile_up_for_a_slow_reader_and_come_in_order():
    async def run():
        batcher, _ = batcher_with()
        slow, fast = batcher.submit(request()), batcher.submit(request())
        await turn()
        for token_id in range(50):
            batcher.stepped([(1, step(token_id)), (2, step(token_id))])
            assert len(await fast.take()) == 1
        assert [one.token_ids[0] for one in await slow.take()] == list(range(50))

    asyncio.run(run())


@given(
    actions=st.lists(
        st.tuples(st.sampled_from(["submit", "finish", "cancel", "reject", "turn"]),
                  st.integers(0, 9)),
        max_size=60,
    ),
    in_flight=st.integers(1, 4),
    waiting=st.integers(1, 5),
)  # fmt: skip
def test_no_schedule_loses_a_request_or_breaks_a_bound(actions, in_flight, waiting):
    async def run():
        batcher, _ = batcher_with(in_flight=in_flight, waiting=waiting)
        live = []
        for action, index in actions:
            if action == "submit":
                try:
                    live.append(batcher.submit(request()))
                except Overloaded:
                    assert batcher.waiting_count >= waiting
            elif action == "turn":
                await turn()
            elif live:
                sequence = live[index % len(live)]
                if action == "cancel":
                    batcher.cancel(sequence)
                    live.remove(sequence)
                elif action == "finish":
                    batcher.stepped([(sequence.sequence_id, step(1, finish=1))])
                else:
                    batcher.rejected(
                        sequence.sequence_id, target_pb2.REJECT_REASON_OVERLOADED, "full"
                    )
            live = [sequence for sequence in live if not sequence.is_ended]
            assert batcher.running_count <= in_flight
            assert batcher.running_count + batcher.waiting_count <= 2 * in_flight + waiting
            assert batcher.running_count + batcher.waiting_count == len(live)
        # Whoever is left is served once the target has places again.
        for _ in range(20 * len(live)):
            if not live:
                break
            await turn()
            batcher._try_again()
            await turn()
            batcher.stepped([(one.sequence_id, step(1, finish=1)) for one in live])
            live = [one for one in live if not one.is_ended]
        assert live == []

    asyncio.run(run())


def test_retry_after_follows_the_measured_rate():
    rate = CompletionRate()
    assert rate.retry_after_seconds(10, now=100.0) == 1.0
    for second in range(10):
        rate.ended(100.0 + second)
    # One a second, 20 wait.
    assert rate.retry_after_seconds(20, now=110.0) == pytest.approx(20.0, rel=0.1)
    assert rate.retry_after_seconds(10_000, now=110.0) == 60.0
    assert rate.retry_after_seconds(20, now=1000.0) == 1.0
