"""The public contract's metric names and labels, on a cluster that has just become ready."""

from pathlib import Path

from bench.cluster import Cluster, running_cluster

CONTRACT = (
    "outrider_drafts_total",
    "outrider_draft_tokens_total",
    "outrider_accepted_tokens_total",
    'outrider_accepted_tokens_per_position_total{position="0"}',
    'outrider_steps_total{mode="speculative"}',
    'outrider_steps_total{mode="plain"}',
    'outrider_bypass_steps_total{reason="threshold"}',
    'outrider_bypass_steps_total{reason="draft_length_zero"}',
    'outrider_bypass_steps_total{reason="circuit_open"}',
    'outrider_link_messages_total{direction="sent",kind="ping"}',
    'outrider_link_messages_total{direction="received",kind="ping"}',
    'outrider_link_messages_total{direction="sent",kind="open"}',
    'outrider_link_messages_total{direction="sent",kind="step"}',
    'outrider_link_messages_total{direction="sent",kind="close"}',
    'outrider_draft_rows_dropped_total{reason="late"}',
    'outrider_draft_rows_dropped_total{reason="token_range"}',
    "outrider_running_sequences",
    "outrider_waiting_sequences",
    'outrider_kv_blocks{state="free"}',
    'outrider_kv_blocks{state="used"}',
    'outrider_service_state{service="target",state="SERVING"}',
    'outrider_service_state{service="draft",state="SERVING"}',
    'outrider_service_state{service="gateway",state="SERVING"}',
    "outrider_time_to_first_token_seconds_count",
    "outrider_inter_token_seconds_count",
    "outrider_link_round_trip_seconds_count",
)


def missing(cluster: Cluster) -> list[str]:
    samples = cluster.metrics()
    return [name for name in CONTRACT if name not in samples]


def test_every_metric_of_the_contract_is_there_as_soon_as_the_cluster_is_ready(
    ngram_cluster: Cluster,
) -> None:
    assert missing(ngram_cluster) == []


def test_without_a_draft_service_the_names_are_the_same_and_the_reason_is_told(
    tiny_model: Path,
) -> None:
    with running_cluster("--model", str(tiny_model), "--draft", "none") as cluster:
        assert missing(cluster) == ['outrider_service_state{service="draft",state="SERVING"}']
        before = cluster.metrics()
        cluster.complete(prompt="one two", max_tokens=4, temperature=0)
        after = cluster.metrics()
        reason = 'outrider_bypass_steps_total{reason="no_draft_service"}'
        assert after[reason] > before[reason]
        assert after["outrider_drafts_total"] == 0
        assert after['outrider_kv_blocks{state="used"}'] == 0
