"""/metrics has exactly the names of the contract."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider.v1 import status_pb2, target_pb2

TARGET = (("service", "target"),)
CONTRACT = {
    "outrider_drafts_total": (),
    "outrider_draft_tokens_total": (),
    "outrider_accepted_tokens_total": (),
    "outrider_accepted_tokens_per_position_total": ("position",),
    "outrider_steps_total": ("mode",),
    "outrider_bypass_steps_total": ("reason",),
    "outrider_link_messages_total": ("direction", "kind"),
    "outrider_draft_rows_dropped_total": ("reason",),
    "outrider_running_sequences": (),
    "outrider_waiting_sequences": (),
    "outrider_kv_blocks": ("state",),
    "outrider_service_state": ("service", "state"),
    "outrider_time_to_first_token_seconds_count": (),
    "outrider_time_to_first_token_seconds_bucket": ("le",),
    "outrider_inter_token_seconds_bucket": ("le",),
    "outrider_link_round_trip_seconds_bucket": ("le",),
    "outrider_requests_total": ("outcome",),
    "outrider_link_feature_bytes_total": ("transport",),
    "outrider_link_step_bytes_total": (),
    "outrider_speculative_seconds_total": ("part",),
}


@pytest.fixture(scope="module")
def counted(ready):
    ready.model.statistics = target_pb2.TargetStatistics(
        drafts=3,
        draft_tokens=12,
        accepted_tokens=7,
        accepted_tokens_per_position=[3, 2, 2],
        speculative_steps=5,
        plain_steps=9,
        bypass_steps=[target_pb2.LabelledCount(label="threshold", count=4)],
        link_messages=[target_pb2.LinkMessageCount(direction="sent", kind="step", count=6)],
        feature_bytes=[target_pb2.LabelledCount(label="inline", count=1152)],
        step_message_bytes=99,
        speculative_seconds=[target_pb2.LabelledSeconds(label="forward", seconds=0.25)],
        draft_rows_dropped=[target_pb2.LabelledCount(label="stale", count=2)],
        running_sequences=1,
        waiting_sequences=2,
        kv_blocks_free=10,
        kv_blocks_used=6,
        kv_blocks_cached=4,
        prompt_tokens=70,
        cached_prompt_tokens=32,
        link_round_trip_seconds=target_pb2.Histogram(
            upper_bounds=[0.001, 0.01], counts=[1, 2, 3], sum=0.5
        ),
    )
    body = {"model": "smollm2-135m-instruct", "prompt": "x", "max_tokens": 9}
    assert ready.client.post("/v1/completions", json=body).status_code == 200
    return samples(ready)


def samples(ready) -> dict:
    text = ready.client.get("/metrics").text
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


@pytest.mark.parametrize(("name", "labels"), CONTRACT.items())
def test_every_name_of_the_contract_is_there_with_its_labels(counted, name, labels):
    found = [keys for sample, keys in counted if sample == name]
    assert found
    assert {tuple(key for key, _ in keys) for keys in found} == {tuple(sorted(labels))}


def test_no_created_series_and_nothing_without_the_prefix(counted):
    assert all(name.startswith("outrider_") for name, _ in counted)
    assert not any(name.endswith("_created") for name, _ in counted)


def test_the_targets_counters_come_through_as_they_are(counted):
    assert counted["outrider_drafts_total", ()] == 3
    assert counted["outrider_accepted_tokens_per_position_total", (("position", "1"),)] == 2
    assert counted["outrider_steps_total", (("mode", "speculative"),)] == 5
    assert counted["outrider_steps_total", (("mode", "plain"),)] == 9
    assert counted["outrider_bypass_steps_total", (("reason", "threshold"),)] == 4
    labels = (("direction", "sent"), ("kind", "step"))
    assert counted["outrider_link_messages_total", labels] == 6
    assert counted["outrider_kv_blocks", (("state", "free"),)] == 10
    assert counted["outrider_kv_blocks", (("state", "cached"),)] == 4
    assert counted["outrider_prompt_tokens_total", ()] == 70
    assert counted["outrider_cached_prompt_tokens_total", ()] == 32
    buckets = [
        counted["outrider_link_round_trip_seconds_bucket", (("le", bound),)]
        for bound in ("0.001", "0.01", "+Inf")
    ]
    assert buckets == [1, 3, 6]
    assert counted["outrider_link_round_trip_seconds_sum", ()] == 0.5
    assert counted["outrider_link_feature_bytes_total", (("transport", "inline"),)] == 1152
    assert counted["outrider_link_step_bytes_total", ()] == 99
    assert counted["outrider_speculative_seconds_total", (("part", "forward"),)] == 0.25


def test_a_request_is_counted_once_and_every_token_but_the_first_has_a_gap(counted):
    assert counted["outrider_requests_total", (("outcome", "length"),)] == 1
    # The canary's own requests are no client's latency.
    assert counted["outrider_time_to_first_token_seconds_count", ()] == 1
    # 9 tokens in runs of 4: the first run has no gap.
    assert counted["outrider_inter_token_seconds_count", ()] == 5


def test_each_service_is_in_exactly_one_state(counted):
    for service in ("gateway", "target", "draft"):
        states = [
            dict(labels)["state"]
            for (name, labels), value in counted.items()
            if name == "outrider_service_state"
            and dict(labels)["service"] == service
            and value == 1
        ]
        assert states == ["SERVING"]


def test_a_gpus_figures_are_there_with_the_service_on_it_and_only_while_it_answers(cluster):
    def on_gpu(message):
        message.gpu.CopyFrom(
            status_pb2.GpuFigures(
                name="NVIDIA H200", memory_used_bytes=5, memory_total_bytes=9, utilization=0.25
            )
        )

    cluster.start_gateway()
    cluster.wait_ready()
    assert not any(name.startswith("outrider_gpu") for name, _ in samples(cluster))
    cluster.do(lambda: cluster.target_status.set(on_gpu))
    cluster.until(lambda: ("outrider_gpu_utilization_ratio", TARGET) in samples(cluster))
    found = samples(cluster)
    assert found["outrider_gpu_utilization_ratio", TARGET] == 0.25
    memory = "outrider_gpu_memory_bytes"
    assert found[memory, (*TARGET, ("state", "used"))] == 5
    assert found[memory, (*TARGET, ("state", "total"))] == 9
    # Not said, so not shown.
    assert ("outrider_gpu_power_watts", TARGET) not in found
    gpu = cluster.client.get("/status").json()["details"]["target"]["gpu"]
    assert gpu["name"] == "NVIDIA H200" and gpu["power_watts"] is None
    cluster.call(cluster.target.stop())
    cluster.until(lambda: not any("gpu" in name for name, _ in samples(cluster)))


def test_without_a_target_every_name_is_still_there(cluster):
    cluster.call(cluster.target.stop())
    cluster.start_gateway()
    found = samples(cluster)
    assert found["outrider_drafts_total", ()] == 0
    labels = (("service", "target"), ("state", "UNREACHABLE"))
    assert found["outrider_service_state", labels] == 1
