"""/metrics: the target's counters, asked for at scrape time, and the gateway's own.

The names are the public contract; prometheus_client adds `_total` to a counter's name by itself.
"""

from collections.abc import Iterable, Sequence

import grpc
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from gateway.cluster import Cluster
from gateway.histogram import Histogram
from gateway.peer_view import VIEW_STATES
from gateway.speculation import SpeculationPolicy
from gateway.stats import Statistics
from outrider.serving.channel import open_channel
from outrider.v1 import status_pb2, target_pb2, target_pb2_grpc

SCRAPE_TIMEOUT_SECONDS = 1.0


async def ask_statistics(
    address: str, credentials: grpc.ChannelCredentials | None
) -> target_pb2.TargetStatistics | None:
    """The target's counters; None if it does not answer."""
    async with open_channel(address, credentials) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            statistics: target_pb2.TargetStatistics = await stub.GetStatistics(
                target_pb2.GetStatisticsRequest(), timeout=SCRAPE_TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError:
            return None
    return statistics


class Snapshot(Collector):
    """What one scrape shows; prometheus_client calls `collect`."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        own: Statistics,
        target: target_pb2.TargetStatistics | None,
    ) -> None:
        self._cluster = cluster
        self._own = own
        self._target = target

    def collect(self) -> Iterable[Metric]:
        """Every metric of the contract, and a few beside it."""
        yield from self._own_metrics()
        # Zeros while it does not answer: to a rate that is a restart, which it mostly is.
        yield from target_metrics(self._target or target_pb2.TargetStatistics())

    def _own_metrics(self) -> Iterable[Metric]:
        states = GaugeMetricFamily(
            "outrider_service_state",
            "1 for the state that a service is in",
            labels=("service", "state"),
        )
        for view in self._cluster.services():
            for state in VIEW_STATES:
                states.add_metric((view.service, state), float(view.state == state))
        yield states
        yield _gauge("outrider_ready", "1 while requests are taken", self._cluster.is_ready)
        yield _gauge(
            "outrider_degraded", "1 while drafts cannot be counted on", self._cluster.is_degraded
        )
        yield _policy_gauge(self._cluster.policy)
        yield from _gpu_gauges(
            peer.last_status
            for peer in self._cluster.peers
            if peer.is_answering and peer.last_status is not None
        )
        connection = self._cluster.connection
        waiting = 0 if connection is None else connection.attachment.batcher.waiting_count
        running = 0 if connection is None else connection.attachment.batcher.running_count
        yield _gauge("outrider_gateway_waiting_requests", "Requests held back", waiting)
        yield _gauge("outrider_gateway_running_requests", "Requests at the target", running)
        yield _gauge(
            "outrider_stalled_sequences",
            "Sequences at the target without progress for --stall-timeout",
            len(self._cluster.stalled()),
        )
        yield _labelled_counter(
            "outrider_requests",
            "Requests by outcome",
            "outcome",
            sorted(self._own.requests.items()),
        )
        replays = self._cluster.replays
        yield _counter(
            "outrider_replayed_sequences",
            "Sequences that went on at another target process than the one that they lost",
            replays.replayed,
        )
        yield _gauge(
            "outrider_sequences_awaiting_replay",
            "Sequences that wait for a target to go on with them",
            replays.waiting_count,
        )
        yield _labelled_counter(
            "outrider_replays_given_up",
            "Sequences that lost their target and ended with an error",
            "reason",
            sorted(replays.given_up.items()),
        )
        yield _histogram(
            "outrider_time_to_first_token_seconds",
            "Seconds from a request's arrival to its first token",
            self._own.time_to_first_token,
        )
        yield _histogram(
            "outrider_inter_token_seconds",
            "Seconds between tokens; those of one step share its time",
            self._own.inter_token,
        )


def _gpu_gauges(statuses: Iterable[status_pb2.ServiceStatus]) -> Iterable[Metric]:
    memory = GaugeMetricFamily(
        "outrider_gpu_memory_bytes",
        "Memory of the GPU that a service computes on, used by all processes and in all",
        labels=("service", "state"),
    )
    utilization = GaugeMetricFamily(
        "outrider_gpu_utilization_ratio",
        "Share of the last moments in which that GPU computed",
        labels=("service",),
    )
    power = GaugeMetricFamily(
        "outrider_gpu_power_watts", "Power drawn by that GPU", labels=("service",)
    )
    for status in statuses:
        if not status.HasField("gpu"):
            continue
        gpu = status.gpu
        memory.add_metric((status.service, "used"), float(gpu.memory_used_bytes))
        memory.add_metric((status.service, "total"), float(gpu.memory_total_bytes))
        if gpu.HasField("utilization"):
            utilization.add_metric((status.service,), gpu.utilization)
        if gpu.HasField("power_watts"):
            power.add_metric((status.service,), gpu.power_watts)
    return (memory, utilization, power)


def _policy_gauge(policy: SpeculationPolicy | None) -> Metric:
    gauge = GaugeMetricFamily(
        "outrider_policy_draft_length",
        "Draft length asked for in steps of up to so many decode rows",
        labels=("max_decode_rows",),
    )
    for rows, draft_length in () if policy is None else policy.rules:
        gauge.add_metric((str(rows),), float(draft_length))
    return gauge


def target_metrics(target: target_pb2.TargetStatistics) -> Iterable[Metric]:
    """The target's counters under the names of the contract."""
    yield _counter("outrider_drafts", "Non-empty drafts verified", target.drafts)
    yield _counter("outrider_draft_tokens", "Draft tokens verified", target.draft_tokens)
    yield _counter("outrider_accepted_tokens", "Draft tokens accepted", target.accepted_tokens)
    yield _labelled_counter(
        "outrider_accepted_tokens_per_position",
        "Draft tokens accepted, by position in the draft",
        "position",
        [(str(index), count) for index, count in enumerate(target.accepted_tokens_per_position)],
    )
    yield _labelled_counter(
        "outrider_steps",
        "Engine steps, with at least one draft or without",
        "mode",
        [("speculative", target.speculative_steps), ("plain", target.plain_steps)],
    )
    yield _labelled_counter(
        "outrider_bypass_steps",
        "Steps with decode rows that asked nothing of the draft service",
        "reason",
        [(count.label, count.count) for count in target.bypass_steps],
    )
    messages = CounterMetricFamily(
        "outrider_link_messages",
        "Messages between target and draft",
        labels=("direction", "kind"),
    )
    for message in target.link_messages:
        messages.add_metric((message.direction, message.kind), message.count)
    yield messages
    yield _labelled_counter(
        "outrider_link_feature_bytes",
        "Bytes of projected features sent to the draft service",
        "transport",
        [(count.label, count.count) for count in target.feature_bytes],
    )
    yield _counter(
        "outrider_link_step_bytes",
        "Bytes of Step messages sent, inline features included",
        target.step_message_bytes,
    )
    yield _labelled_counter(
        "outrider_draft_rows_dropped",
        "Draft rows not used",
        "reason",
        [(count.label, count.count) for count in target.draft_rows_dropped],
    )
    yield _gauge("outrider_running_sequences", "Sequences running", target.running_sequences)
    yield _gauge("outrider_waiting_sequences", "Sequences waiting", target.waiting_sequences)
    blocks = GaugeMetricFamily("outrider_kv_blocks", "KV cache blocks", labels=("state",))
    blocks.add_metric(("free",), target.kv_blocks_free)
    blocks.add_metric(("used",), target.kv_blocks_used)
    blocks.add_metric(("cached",), target.kv_blocks_cached)
    yield blocks
    yield _counter("outrider_prompt_tokens", "Prompt tokens", target.prompt_tokens)
    yield _counter(
        "outrider_cached_prompt_tokens",
        "Prompt tokens that were in the KV cache",
        target.cached_prompt_tokens,
    )
    yield _counter("outrider_preemptions", "Sequences recomputed", target.preemptions)
    yield _counter("outrider_emitted_tokens", "Output tokens emitted", target.emitted_tokens)
    yield _histogram(
        "outrider_link_round_trip_seconds",
        "Seconds from asking for drafts to having them",
        target.link_round_trip_seconds,
    )
    steps = HistogramMetricFamily(
        "outrider_step_seconds", "Seconds of an engine step", labels=("mode",)
    )
    for mode, histogram in (
        ("speculative", target.speculative_step_seconds),
        ("plain", target.plain_step_seconds),
    ):
        steps.add_metric((mode,), _buckets(histogram), histogram.sum)
    yield steps
    yield _labelled_counter(
        "outrider_speculative_seconds",
        "Seconds of speculative steps: waiting for drafts, the forward, and what drafting took",
        "part",
        [(part.label, part.seconds) for part in target.speculative_seconds],
    )


def _counter(name: str, words: str, value: float) -> Metric:
    return CounterMetricFamily(name, words, value=value)


def _gauge(name: str, words: str, value: float) -> Metric:
    return GaugeMetricFamily(name, words, value=float(value))


def _labelled_counter(
    name: str, words: str, label: str, counts: Sequence[tuple[str, float]]
) -> Metric:
    family = CounterMetricFamily(name, words, labels=(label,))
    for value, count in counts:
        family.add_metric((value,), count)
    return family


def _histogram(name: str, words: str, histogram: Histogram | target_pb2.Histogram) -> Metric:
    return HistogramMetricFamily(name, words, buckets=_buckets(histogram), sum_value=histogram.sum)


def _buckets(histogram: Histogram | target_pb2.Histogram) -> list[tuple[str, float]]:
    """Prometheus wants cumulative counts; a histogram that was never fed may have no bounds."""
    buckets = []
    total = 0
    counts = list(histogram.counts) or [0] * (len(histogram.upper_bounds) + 1)
    bounds = [str(float(bound)) for bound in histogram.upper_bounds] + ["+Inf"]
    for bound, count in zip(bounds, counts, strict=False):
        total += count
        buckets.append((bound, float(total)))
    return buckets
