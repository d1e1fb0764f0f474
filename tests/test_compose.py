"""docker-compose.yml, run without containers: every CPU service's own command, environment and
health check as local processes, in the order of `depends_on`, up to a completion over REST.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
SECONDS_TO_HEALTHY = 120.0
SECONDS_TO_ACCEPT = 60.0
SECONDS_TO_STOP = 40.0

Service = dict[str, Any]


def compose(environment: Mapping[str, str]) -> dict[str, Any]:
    """The file with its `${NAME:-default}` filled in, after parsing, as docker compose does."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    document: dict[str, Any] = _filled(yaml.safe_load(text), environment)
    return document


def _filled(node: Any, environment: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _filled(value, environment) for key, value in node.items()}
    if isinstance(node, list):
        return [_filled(value, environment) for value in node]
    if isinstance(node, str):
        return re.sub(
            r"\$\{(\w+):-([^}]*)\}",
            lambda match: environment.get(match[1]) or match[2],
            node,
        )
    return node


def profile_services(document: dict[str, Any], profile: str) -> dict[str, Service]:
    """What `docker compose --profile NAME up` starts."""
    return {
        name: service
        for name, service in document["services"].items()
        if profile in service.get("profiles", [profile])
    }


def start_order(services: dict[str, Service]) -> list[str]:
    """Names in the order of depends_on."""
    order: list[str] = []
    while len(order) < len(services):
        free = [
            name
            for name, service in services.items()
            if name not in order
            and all(peer in order for peer in service.get("depends_on", {}) if peer in services)
        ]
        assert free, f"depends_on has a cycle behind {order}"
        order.extend(free)
    return order


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True, kw_only=True)
class Here:
    """The containers' network on this machine: hosts become loopback, ports become free ones."""

    names: tuple[str, ...]
    ports: Mapping[str, int]

    def argument(self, text: str) -> str:
        """A word of a command, with the addresses of this machine."""
        if text == "python":
            return sys.executable
        text = text.replace("0.0.0.0", "127.0.0.1")
        text = re.sub(rf"\b({'|'.join(self.names)}):(?=\d)", "127.0.0.1:", text)
        return re.sub(r"\b\d{4,5}\b", lambda match: str(self.ports.get(match[0], match[0])), text)

    def environment(self, service: Service) -> dict[str, str]:
        """Only what the file sets, besides what any process here needs."""
        base = {k: v for k, v in os.environ.items() if not k.startswith("OUTRIDER_")}
        return {**base, **{k: str(v) for k, v in service.get("environment", {}).items()}}

    def health_check(self, service: Service) -> subprocess.CompletedProcess[str]:
        kind, *words = service["healthcheck"]["test"]
        assert kind == "CMD"
        return subprocess.run(
            [self.argument(word) for word in words],
            capture_output=True,
            text=True,
            env=self.environment(service),
            timeout=30,
        )


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return compose({})


@pytest.fixture(scope="module")
def started(document: dict[str, Any]) -> Iterator[tuple[Here, dict[str, Service]]]:
    """The CPU services, each started once those that it depends on are healthy."""
    services = profile_services(document, "cpu")
    ports = {port: free_port() for port in ("50050", "50051", "50052", "8000")}
    here = Here(names=tuple(services), ports=ports)
    processes: dict[str, subprocess.Popen[bytes]] = {}
    with ExitStack() as stack:
        for name in start_order(services):
            service = services[name]
            process = stack.enter_context(
                subprocess.Popen(
                    [here.argument(word) for word in service["command"]],
                    env=here.environment(service),
                    stdin=subprocess.DEVNULL,
                )
            )
            # Before the wait of the line above, whatever happens in between.
            stack.callback(process.kill)
            processes[name] = process
            _wait_until_healthy(here, name, service, process)
        yield here, services
        for name in reversed(start_order(services)):
            processes[name].send_signal(signal.SIGTERM)
            assert processes[name].wait(SECONDS_TO_STOP) == 0, name


def _wait_until_healthy(
    here: Here, name: str, service: Service, process: subprocess.Popen[bytes]
) -> None:
    deadline = time.monotonic() + SECONDS_TO_HEALTHY
    while (check := here.health_check(service)).returncode != 0:
        assert process.poll() is None, f"{name} exited with {process.returncode}"
        assert time.monotonic() < deadline, f"{name} did not get healthy: {check.stdout}"
        time.sleep(0.2)


def test_the_file_as_it_is_answers_a_completion(
    started: tuple[Here, dict[str, Service]],
) -> None:
    here, _ = started
    url = f"http://127.0.0.1:{here.ports['8000']}"
    models = httpx.get(f"{url}/v1/models", trust_env=False).json()
    deadline = time.monotonic() + SECONDS_TO_ACCEPT
    accepted = 0
    # A busy machine may answer a short request before its first draft arrives.
    while accepted == 0:
        assert time.monotonic() < deadline, "no draft token was accepted"
        response = httpx.post(
            f"{url}/v1/completions",
            json={
                "model": models["data"][0]["id"],
                "prompt": "one, two, three, one, two, three, one, two,",
                "max_tokens": 16,
                "temperature": 0,
            },
            timeout=60,
            trust_env=False,
        )
        assert response.status_code == 200, response.text
        body = response.json()
        assert "three" in body["choices"][0]["text"]
        accepted = body["usage"]["completion_tokens_details"]["accepted_prediction_tokens"]


def test_every_health_check_tells_a_service_that_is_not_there(
    document: dict[str, Any],
) -> None:
    services = profile_services(document, "cpu")
    ports = {port: free_port() for port in ("50050", "50051", "50052", "8000")}
    here = Here(names=tuple(services), ports=ports)
    for name, service in services.items():
        assert here.health_check(service).returncode == 1, name


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_draft_comes_first_then_the_target_then_the_gateway(
    document: dict[str, Any], profile: str
) -> None:
    services = profile_services(document, profile)
    suffix = "" if profile == "cpu" else "-cuda"
    assert start_order(services) == [f"draft{suffix}", f"target{suffix}", "gateway"]
    for service in services.values():
        for dependency in service.get("depends_on", {}).values():
            assert dependency["condition"] == "service_healthy"


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_target_and_draft_share_their_memory_and_all_share_the_models(
    document: dict[str, Any], profile: str
) -> None:
    services = profile_services(document, profile)
    draft, target, _ = start_order(services)
    assert services[draft]["ipc"] == "shareable"
    assert services[target]["ipc"] == f"service:{draft}"
    for service in services.values():
        assert "models:/models" in service["volumes"]
    assert "models" in document["volumes"]


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_only_the_gateway_opens_ports_to_the_outside(
    document: dict[str, Any], profile: str
) -> None:
    opened = {
        name for name, service in profile_services(document, profile).items() if "ports" in service
    }
    assert opened == {"gateway"}
    ports = document["services"]["gateway"]["ports"]
    assert ports == ["127.0.0.1:8000:8000", "127.0.0.1:50050:50050"]


def test_the_ports_are_opened_to_others_by_a_variable() -> None:
    ports = compose({"PUBLISH_ADDRESS": "0.0.0.0"})["services"]["gateway"]["ports"]
    assert ports == ["0.0.0.0:8000:8000", "0.0.0.0:50050:50050"]


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_the_services_reach_each_other_by_the_names_in_their_commands(
    document: dict[str, Any], profile: str
) -> None:
    services = profile_services(document, profile)
    names = set(services)
    for service in services.values():
        names.update(service.get("networks", {}).get("default", {}).get("aliases", []))
    for service in services.values():
        assert "--host=0.0.0.0" in service["command"]
        for word in service["command"]:
            address = re.fullmatch(r"--\w+-address=(.+):\d+", word)
            assert address is None or address[1] in names, word


def test_every_image_is_a_stage_of_the_dockerfile_that_runs_without_root(
    document: dict[str, Any],
) -> None:
    stages: dict[str, tuple[str, list[str]]] = {}
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines():
        stage = re.fullmatch(r"FROM (\S+) AS (\S+)", line)
        if stage:
            stages[stage[2]] = (stage[1], [])
        elif stages and line.strip():
            next(reversed(stages.values()))[1].append(line)

    def lines_of(name: str) -> list[str]:
        base, lines = stages[name]
        return [*(lines_of(base) if base in stages else []), *lines]

    for name, service in document["services"].items():
        lines = lines_of(service["build"]["target"])
        users = [line for line in lines if line.startswith("USER")]
        assert users == ["USER outrider"], name
        has_torch = any("[engine]" in line or "[cuda]" in line for line in lines)
        assert has_torch == (name != "gateway"), name


def test_cpus_are_the_default_and_gpus_a_profile(document: dict[str, Any]) -> None:
    assert "COMPOSE_PROFILES=cpu" in (ROOT / ".env").read_text(encoding="utf-8").splitlines()
    for name, service in document["services"].items():
        has_gpu = "deploy" in service
        assert has_gpu == name.endswith("-cuda")
        assert ("--device=cuda" in service["command"]) == has_gpu


@pytest.mark.parametrize(
    "name", ["OUTRIDER_DRAFT", "OUTRIDER_MODEL", "OUTRIDER_SPECULATION", "OUTRIDER_API_KEYS"]
)
def test_a_variable_of_the_shell_reaches_the_services(name: str) -> None:
    services = compose({name: "something"})["services"].values()
    assert "something" in [service.get("environment", {}).get(name) for service in services]


@pytest.mark.parametrize("profile", ["cpu", "cuda"])
def test_containers_have_a_read_only_root_and_no_privileges(profile: str) -> None:
    services = profile_services(compose({}), profile)
    assert len(services) >= 3
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "no-new-privileges:true" in service["security_opt"]
        assert not service.get("privileged", False)
        assert service.get("user") not in ("root", "0")


def test_every_image_ends_as_a_user_that_is_not_root() -> None:
    users: dict[str, str] = {}
    stage = ""
    for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines():
        if found := re.match(r"FROM (\S+) AS (\S+)", line):
            stage = found[2]
            users[stage] = users.get(found[1], "root")
        elif found := re.match(r"USER (\S+)", line):
            users[stage] = found[1]
    images = {"gateway", "target", "draft", "target-cuda", "draft-cuda"}
    assert {users[image] for image in images} == {"outrider"}
