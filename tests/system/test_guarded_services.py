"""Three processes that show each other certificates, and what a default start leaves open."""

import ipaddress
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from bench.cluster import Cluster, running_cluster
from outrider.serving.access import http_access
from outrider.serving.api_keys import line_of
from tests.certificates import Authority

KEY = "sk-of-a-system-test"


def free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


@contextmanager
def services(commands: list[list[str]], environment: dict[str, str]) -> Iterator[None]:
    running = [
        subprocess.Popen([sys.executable, "-m", *command], env={**os.environ, **environment})
        for command in commands
    ]
    try:
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(30)


def wait_ready(client: httpx.Client) -> None:
    deadline = time.monotonic() + 120
    while True:
        try:
            response = client.get("/readyz")
        except httpx.ConnectError:
            response = None
        if response is not None and response.status_code == 200:
            return
        assert time.monotonic() < deadline, response and response.text
        time.sleep(0.1)


def test_three_services_with_mutual_tls_and_keys_answer_and_their_probes_pass(
    tiny_model: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    pair = authority.sign("service")
    client_pair = authority.sign("client")
    target, draft, gateway, rest = free_ports(4)
    (tmp_path / "keys").write_text(line_of("me", KEY))
    environment = {
        "OUTRIDER_TLS_CERTIFICATE": pair.certificate, "OUTRIDER_TLS_KEY": pair.key,
        "OUTRIDER_TLS_CLIENT_CA": authority.ca, "OUTRIDER_TLS_PEER_CA": authority.ca,
        "OUTRIDER_DRAIN_TIMEOUT": "2",
    }  # fmt: skip
    commands = [
        ["target_service", "--port", str(target), "--model", str(tiny_model),
         "--draft-address", f"127.0.0.1:{draft}"],
        ["draft_service", "--port", str(draft), "--draft", "ngram", "--model", str(tiny_model)],
        ["gateway", "--port", str(gateway), "--rest-port", str(rest), "--model", str(tiny_model),
         "--target-address", f"127.0.0.1:{target}", "--draft-address", f"127.0.0.1:{draft}",
         "--speculation", "fixed", "--api-key-file", str(tmp_path / "keys")],
    ]  # fmt: skip
    access = http_access(
        api_key=KEY, ca=authority.ca, certificate=client_pair.certificate, key=client_pair.key
    )
    url = f"https://127.0.0.1:{rest}"
    with services(commands, environment), httpx.Client(
        base_url=url, verify=access.verify, headers=access.headers, trust_env=False, timeout=60
    ) as client:  # fmt: skip
        wait_ready(client)
        model = client.get("/v1/models").json()["data"][0]["id"]
        answer = client.post(
            "/v1/completions",
            json={"model": model, "prompt": "a b c a b c a b", "max_tokens": 24, "temperature": 0},
        )
        assert answer.status_code == 200
        # Over the link, too: drafts came.
        details = answer.json()["usage"]["completion_tokens_details"]
        assert sum(details[f"{what}_prediction_tokens"] for what in ("accepted", "rejected")) > 0
        client.headers.pop("authorization")
        assert client.get("/v1/models").status_code == 401
        for place in (f"127.0.0.1:{target}", f"127.0.0.1:{draft}", f"{url}/readyz"):
            probe = [sys.executable, "-m", "outrider.serving.probe", place]
            done = subprocess.run(probe, env={**os.environ, **environment}, capture_output=True)
            assert done.returncode == 0, done.stdout
            # Without the certificate it is a stranger.
            assert subprocess.run(probe, capture_output=True).returncode == 1


def listeners(process_id: int) -> set[tuple[str, int]]:
    """Address and port of every TCP socket that a process listens on, as the kernel tells."""
    inodes = set()
    for entry in Path(f"/proc/{process_id}/fd").iterdir():
        try:
            inodes.add(os.readlink(entry))
        except FileNotFoundError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                packed, port = fields[1].split(":")
                words = bytes.fromhex(packed)
                # Every group of four bytes is in the processor's order.
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ipaddress.ip_address(raw)
                # gRPC listens on IPv4 addresses through sockets of IPv6.
                mapped = address.ipv4_mapped if address.version == 6 else None
                found.add((str(mapped or address), int(port, 16)))
    return found


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="needs Linux's /proc")
def test_a_default_start_listens_on_loopback_only(ngram_cluster: Cluster) -> None:
    found = {
        service: listeners(ngram_cluster.process_id(service))
        for service in ("target", "draft", "gateway")
    }
    # Else the scan has not seen them.
    assert {service: len(places) for service, places in found.items()} == {
        "target": 1, "draft": 1, "gateway": 2,
    }  # fmt: skip
    for places in found.values():
        assert all(ipaddress.ip_address(host).is_loopback for host, _ in places)


@pytest.mark.full
def test_up_with_tls_and_keys_becomes_ready_and_says_what_is_open(
    tiny_model: Path, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    pair = authority.sign("gateway")
    keys = tmp_path / "keys"
    keys.write_text(line_of("me", KEY))
    with running_cluster(
        "--model", str(tiny_model), "--draft", "ngram", "--host", "0.0.0.0",
        "--tls-certificate", pair.certificate, "--tls-key", pair.key,
        "--tls-client-ca", authority.ca, "--api-key-file", str(keys),
    ) as cluster:  # fmt: skip
        assert cluster.url.startswith("https://127.0.0.1:")
        command = [
            sys.executable, "-m", "outrider.cli.main", "status", "--url", cluster.url,
            "--api-key", KEY, "--tls-ca", authority.ca,
            "--tls-certificate", pair.certificate, "--tls-key", pair.key,
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert any(
            "listens beyond this machine, on 0.0.0.0, over mutual TLS, with API keys" in line
            for line in cluster.errors
        )
        assert cluster.stop() == 0
