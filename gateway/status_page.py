"""/readyz for machines and /status for people and dashboards, as JSON values."""

from dataclasses import asdict
from typing import Any

from gateway.cluster import Cluster
from outrider.serving.lifecycle import Lifecycle
from outrider.serving.stages import state_name
from outrider.v1 import status_pb2


def readiness(cluster: Cluster) -> dict[str, Any]:
    """Ready or not, every service's state, stage and reason, and sequences that do not get on."""
    return {
        "ready": cluster.is_ready,
        "degraded": cluster.is_degraded,
        "services": [asdict(view) for view in cluster.services()],
        "stalled_sequences": [asdict(sequence) for sequence in cluster.stalled()],
    }


def status_page(cluster: Cluster, lifecycle: Lifecycle[Any]) -> dict[str, Any]:
    """Everything that is known."""
    details = {"gateway": {**service_object(lifecycle.status()), "is_answering": True}}
    for peer in cluster.peers:
        # Of a service that is gone: what it said last.
        if peer.last_status is not None:
            status = service_object(peer.last_status)
            details[peer.service] = {**status, "is_answering": peer.is_answering}
    return {
        **readiness(cluster),
        "details": details,
        "speculation": _speculation(cluster),
        "connection": _connection(cluster),
        "replay": _replay(cluster),
    }


def service_object(status: status_pb2.ServiceStatus) -> dict[str, Any]:
    """A ServiceStatus as JSON; boot ids as text, since they do not fit every reader's numbers."""
    return {
        "service": status.service,
        "state": state_name(status.state),
        "stages": [
            {
                "name": stage.name,
                "state": _short(status_pb2.StageState.Name(stage.state), "STAGE_STATE_"),
                "seconds": stage.seconds,
                "detail": stage.detail,
            }
            for stage in status.stages
        ],
        "failure": (
            {"stage": status.failure.stage, "reason": status.failure.reason}
            if status.HasField("failure")
            else None
        ),
        "version": status.version,
        "source_file": status.source_file,
        "boot_id": f"{status.boot_id:016x}",
        "process_id": status.process_id,
        "uptime_seconds": status.uptime_seconds,
        "configuration": dict(sorted(status.configuration.items())),
        "model_fingerprint": status.model_fingerprint,
        "device": status.device,
        "gpu": _gpu(status),
        "limits": dict(sorted(status.limits.items())),
        "links": [
            {
                "address": link.address,
                "state": _short(status_pb2.LinkState.Name(link.state), "LINK_STATE_"),
                "reason": link.reason,
                "draft_boot_id": f"{link.draft_boot_id:016x}",
                "stream_epoch": link.stream_epoch,
                "drafter": link.drafter,
                "round_trip_p50_seconds": link.round_trip_p50_seconds,
                "round_trip_p95_seconds": link.round_trip_p95_seconds,
                "feature_transport": link.feature_transport,
                "feature_layer_ids": list(link.feature_layer_ids),
                "alert": link.alert,
            }
            for link in status.links
        ],
    }


def _gpu(status: status_pb2.ServiceStatus) -> dict[str, Any] | None:
    if not status.HasField("gpu"):
        return None
    gpu = status.gpu
    return {
        "name": gpu.name,
        "driver_version": gpu.driver_version,
        "memory_used_bytes": gpu.memory_used_bytes,
        "memory_total_bytes": gpu.memory_total_bytes,
        "utilization": gpu.utilization if gpu.HasField("utilization") else None,
        "power_watts": gpu.power_watts if gpu.HasField("power_watts") else None,
    }


def _speculation(cluster: Cluster) -> dict[str, Any] | None:
    policy, connection = cluster.policy, cluster.connection
    if policy is None or connection is None:
        return None
    buckets, rates = connection.attachment.speculation.estimates()
    return {
        "rules": [
            {"max_decode_rows": rows, "draft_length": draft_length}
            for rows, draft_length in policy.rules
        ],
        "max_decode_rows": policy.max_decode_rows,
        "reasons": list(policy.reasons),
        "acceptance_by_position": rates,
        # What is expected by draft length, from 0 on; of decode rows that have been seen.
        "estimates": [asdict(bucket) for bucket in buckets if bucket.steps],
    }


def _connection(cluster: Cluster) -> dict[str, Any]:
    connection = cluster.connection
    check = cluster.draft_check
    problem = cluster.draft_problem()
    page: dict[str, Any] = {
        "draft_canary": None if check is None else asdict(check.report),
        "draft_problem": None if problem is None else asdict(problem),
    }
    if connection is None:
        return {**page, "problem": asdict(cluster.connection_problem)}
    attachment = connection.attachment
    return {
        **page,
        "problem": None,
        "target_boot_id": f"{attachment.stream.target_boot_id:016x}",
        "canary": asdict(connection.canary),
        "running_requests": attachment.batcher.running_count,
        "waiting_requests": attachment.batcher.waiting_count,
        "model": attachment.model.name,
        "max_sequence_length": attachment.model.max_sequence_length,
    }


def _replay(cluster: Cluster) -> dict[str, Any]:
    replays = cluster.replays
    return {
        "waiting_requests": replays.waiting_count,
        "replayed": replays.replayed,
        "given_up": dict(replays.given_up),
        "max_replays": replays.limits.max_replays,
        "timeout_seconds": replays.limits.timeout_seconds,
    }


def _short(name: str, prefix: str) -> str:
    return name.removeprefix(prefix)
