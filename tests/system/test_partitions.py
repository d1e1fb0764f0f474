"""What lies between the services cut, held back one way or both, slowed down or spoiled, while
streams run: the same tokens, bounded gaps, and afterwards all as before.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from partitioned_services import PEER_TIMEOUT_SECONDS, Services, partitioned_services

from tests.tcp_proxy import BOTH_WAYS, TcpProxy, Way

FAULT_SECONDS = 1.0
# Of one stream while the draft service is out of reach. A step takes some 20 ms here, the longest
# wait for a draft is 40 ms beyond it; the rest is what other work on the machine may take.
LONGEST_GAP_SECONDS = 0.6
BYPASS = 'outrider_bypass_steps_total{reason="%s"}'


@pytest.fixture(scope="module")
def running(tiny_model: Path) -> Iterator[Services]:
    with partitioned_services(tiny_model) as services:
        yield services


def draftless_steps(running: Services) -> float:
    """Steps without drafts for what is wrong with the link, and drafts that came too late."""
    return (
        running.metric(BYPASS % "link_down")
        + running.metric(BYPASS % "circuit_open")
        + running.metric('outrider_draft_rows_dropped_total{reason="late"}')
    )


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda link: link.cut(), id="cut", marks=pytest.mark.full),
        pytest.param(lambda link: link.hold(*BOTH_WAYS), id="held", marks=pytest.mark.full),
        pytest.param(
            lambda link: link.hold(Way.TO_SERVER), id="held to the draft", marks=pytest.mark.full
        ),
        pytest.param(lambda link: link.hold(Way.TO_CLIENT), id="held to the target"),
        pytest.param(lambda link: link.spoil(one_in=97), id="spoiled"),
        pytest.param(lambda link: link.throttle(500), id="throttled", marks=pytest.mark.full),
    ],
)
def test_a_draft_service_out_of_reach_costs_speed_for_as_long_as_it_is(
    running: Services, fault: Callable[[TcpProxy], None]
) -> None:
    before = draftless_steps(running)
    streams = running.start_streams()
    running.wait_for(streams, 20)
    fault(running.link)
    began = time.monotonic()
    time.sleep(FAULT_SECONDS)
    # They went on meanwhile.
    assert all(stream.times[-1] > began for stream in streams)
    running.link.heal()
    running.finish(streams)
    print(max(stream.longest_gap() for stream in streams))
    assert max(stream.longest_gap() for stream in streams) < LONGEST_GAP_SECONDS
    assert draftless_steps(running) > before
    accepted = running.metric("outrider_accepted_tokens_total")

    def drafts_again() -> bool:
        running.finish(running.start_streams())
        return running.metric("outrider_accepted_tokens_total") > accepted + 50

    running.until(drafts_again, 15)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(lambda decode: decode.cut(), id="cut", marks=pytest.mark.full),
        pytest.param(lambda decode: decode.hold(*BOTH_WAYS), id="held"),
        pytest.param(
            lambda decode: decode.hold(Way.TO_CLIENT),
            id="held to the gateway",
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_target_out_of_reach_is_a_pause(
    running: Services, fault: Callable[[TcpProxy], None]
) -> None:
    replayed = running.metric("outrider_replayed_sequences_total")
    streams = running.start_streams()
    running.wait_for(streams, 20)
    fault(running.decode)
    running.until(lambda: not running.is_ready(), 3 * PEER_TIMEOUT_SECONDS)
    # New requests are told so at once.
    started = time.monotonic()
    refused = running.client.post("/v1/completions", json={"model": running.model, "prompt": "Hi"})
    assert refused.status_code == 503
    assert "retry-after" in refused.headers
    assert time.monotonic() - started < PEER_TIMEOUT_SECONDS
    running.decode.heal()
    running.finish(streams)
    running.until(running.is_ready)
    assert running.metric("outrider_replayed_sequences_total") >= replayed + len(streams)


def test_a_target_that_hears_nothing_finishes_what_it_has_and_gets_nothing_new(
    running: Services,
) -> None:
    streams = running.start_streams()
    running.wait_for(streams, 20)
    running.decode.hold(Way.TO_SERVER)
    running.finish(streams)
    running.until(lambda: not running.is_ready(), 3 * PEER_TIMEOUT_SECONDS + 5)
    response = running.client.post(
        "/v1/completions", json={"model": running.model, "prompt": "Hi"}, timeout=10
    )
    assert response.status_code == 503
    running.decode.heal()
    running.until(running.is_ready)
    running.finish(running.start_streams())
