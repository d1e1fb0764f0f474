"""Which flags and variables `outrider up` gives to which service."""

import socket
from collections.abc import Mapping
from pathlib import Path

import pytest

from outrider.cli.child import ChildPlan
from outrider.cli.cluster import (
    Cluster,
    ClusterOptions,
    ServiceKinds,
    installed_services,
    plan_cluster,
)
from outrider.serving.errors import ConfigurationError
from tests.certificates import Authority


@pytest.fixture(scope="module")
def kinds() -> ServiceKinds:
    return installed_services()


def plan(
    kinds: ServiceKinds,
    *,
    draft: str | None = None,
    host: str = "127.0.0.1",
    rest_port: int = 0,
    flags: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Cluster:
    options = ClusterOptions(host=host, rest_port=rest_port, port=0, draft=draft, flags=flags or {})
    return plan_cluster(
        options,
        kinds,
        own_variables={"OUTRIDER_LOG_DIR"},
        environment={"PATH": "/bin", **(environment or {})},
    )


def member(cluster: Cluster, service: str) -> ChildPlan:
    return next(plan for plan in cluster.plans if plan.service == service)


def test_the_services_get_each_others_addresses(kinds: ServiceKinds) -> None:
    cluster = plan(kinds)
    target, draft, gateway = cluster.plans
    assert f"--draft-address={draft.address}" in target.arguments
    assert f"--draft-address={draft.address}" in gateway.arguments
    assert f"--target-address={target.address}" in gateway.arguments
    ports = [address.rpartition(":")[2] for address in (target.address, draft.address)]
    assert f"--port={ports[0]}" in target.arguments
    assert f"--port={ports[1]}" in draft.arguments
    assert len({target.address, draft.address, gateway.address, cluster.url}) == 4


def test_a_flag_goes_to_every_service_that_knows_it_and_to_no_other(kinds: ServiceKinds) -> None:
    cluster = plan(kinds, flags={"dtype": "float32", "max_draft_length": "3", "model": "m"})
    target, draft, gateway = (member(cluster, name) for name in ("target", "draft", "gateway"))
    assert {"--dtype=float32", "--max-draft-length=3", "--model=m"} <= set(target.arguments)
    assert {"--dtype=float32", "--max-draft-length=3", "--model=m"} <= set(draft.arguments)
    assert {"--max-draft-length=3", "--model=m"} <= set(gateway.arguments)
    assert not any("dtype" in argument for argument in gateway.arguments)


def test_a_service_gets_only_the_variables_that_it_knows(kinds: ServiceKinds) -> None:
    environment = {
        "PATH": "/bin",
        "OUTRIDER_BATCH_WINDOW_MS": "2",
        "OUTRIDER_LOG_DIR": "/tmp/logs",
        "OUTRIDER_INJECT_FAULT": "target:weights:raise",
        "OUTRIDER_KV_CACHE_MIB": "64",
    }
    cluster = plan(kinds, environment=environment)
    given = {
        plan.service: {name for name in plan.environment if name.startswith("OUTRIDER_")}
        for plan in cluster.plans
    }
    assert given == {
        "target": {"OUTRIDER_INJECT_FAULT", "OUTRIDER_KV_CACHE_MIB"},
        "draft": {"OUTRIDER_INJECT_FAULT", "OUTRIDER_KV_CACHE_MIB"},
        "gateway": {"OUTRIDER_INJECT_FAULT", "OUTRIDER_BATCH_WINDOW_MS"},
    }
    assert all(plan.environment["PATH"] == "/bin" for plan in cluster.plans)


def test_without_a_draft_none_is_started_and_none_is_asked_for(kinds: ServiceKinds) -> None:
    cluster = plan(kinds, draft="none")
    assert [plan.service for plan in cluster.plans] == ["target", "gateway"]
    for service in cluster.plans:
        assert "--draft-address=" in service.arguments


def test_holding_failures_is_asked_of_every_service(kinds: ServiceKinds) -> None:
    held = plan(kinds, flags={"on_startup_failure": "hold"})
    assert held.holds_failures
    assert all("--on-startup-failure=hold" in plan.arguments for plan in held.plans)
    by_variable = plan(kinds, environment={"OUTRIDER_ON_STARTUP_FAILURE": "hold"})
    assert by_variable.holds_failures
    assert not plan(kinds).holds_failures


def test_only_the_gateway_listens_on_another_host_than_loopback(kinds: ServiceKinds) -> None:
    cluster = plan(kinds, host="0.0.0.0")
    hosts = {
        plan.service: next(item for item in plan.arguments if item.startswith("--host="))
        for plan in cluster.plans
    }
    assert hosts == {
        "target": "--host=127.0.0.1",
        "draft": "--host=127.0.0.1",
        "gateway": "--host=0.0.0.0",
    }
    assert cluster.url.startswith("http://127.0.0.1:")


@pytest.mark.parametrize(
    ("flags", "environment", "words"),
    [
        ({}, {"OUTRIDER_MODLE": "x"}, "unknown variable OUTRIDER_MODLE"),
        ({}, {"OUTRIDER_TARGET_ADDRESS": "h:1"}, "OUTRIDER_TARGET_ADDRESS.*decides"),
        ({"speculation": "maybe"}, {}, "gateway: speculation is 'maybe'"),
        ({"max_draft_length": "99"}, {}, "(target|draft): max-draft-length is '?99.*32"),
        ({}, {"OUTRIDER_KV_CACHE_MIB": "0"}, "(target|draft): kv-cache-mib is '0'"),
        ({}, {"OUTRIDER_INJECT_FAULT": "target:nowhere:raise"}, "point 'nowhere'"),
        ({"no_such_thing": "1"}, {}, "--no-such-thing: none of the services"),
    ],
)
def test_what_a_service_would_refuse_is_refused_before_anything_starts(
    kinds: ServiceKinds, flags: dict[str, str], environment: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        plan(kinds, flags=flags, environment=environment)


def test_a_flag_of_a_draft_that_is_not_started_is_refused(kinds: ServiceKinds) -> None:
    with pytest.raises(ConfigurationError, match="--draft-model: none of the services"):
        plan(kinds, draft="none", flags={"draft_model": "m"})


def test_a_port_that_is_taken_is_refused_by_its_flag(kinds: ServiceKinds) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"--rest-port {port}: cannot listen"):
            plan(kinds, rest_port=port)


def test_only_the_gateway_gets_certificates_and_keys_and_up_a_key_of_its_own(
    kinds: ServiceKinds, tmp_path: Path
) -> None:
    pair = Authority(tmp_path).sign("gateway")
    cluster = plan(
        kinds,
        flags={"tls_certificate": pair.certificate},
        environment={"OUTRIDER_TLS_KEY": pair.key, "OUTRIDER_API_KEYS": "a-key-of-a-client"},
    )
    target, draft, gateway = cluster.plans
    for other in (target, draft):
        assert not any("tls" in argument for argument in other.arguments)
        assert not any("TLS" in name or "API_KEY" in name for name in other.environment)
        assert other.access.api_key == "" and other.access.scheme == "http"
    assert f"--tls-certificate={pair.certificate}" in gateway.arguments
    assert gateway.environment["OUTRIDER_TLS_KEY"] == pair.key
    known = gateway.environment["OUTRIDER_API_KEYS"].split(",")
    assert known == ["a-key-of-a-client", cluster.access.api_key]
    assert not any(cluster.access.api_key in argument for argument in gateway.arguments)
    assert cluster.url.startswith("https://")
    assert gateway.access == cluster.access


def test_without_keys_up_makes_none(kinds: ServiceKinds) -> None:
    cluster = plan(kinds)
    assert cluster.access.api_key == "" and cluster.url.startswith("http://")
    assert "OUTRIDER_API_KEYS" not in member(cluster, "gateway").environment


def test_how_the_services_reach_each_other_is_ups_to_decide(kinds: ServiceKinds) -> None:
    with pytest.raises(ConfigurationError, match="OUTRIDER_TLS_PEER_CA"):
        plan(kinds, environment={"OUTRIDER_TLS_PEER_CA": "/ca.pem"})
