"""Target, draft service and gateway as processes, with a TCP proxy between each two that talk, and
streams through all of them.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from test_guarded_services import free_ports, services, wait_ready

from tests.tcp_proxy import TcpProxy, tcp_proxies

PEER_TIMEOUT_SECONDS = 1.0
MAX_TOKENS = 350
# Half of them say what n-grams foresee.
PROMPTS = ("a b c d a b c d a b c d a b", "The red fox", "1, 2, 3, 4, 1, 2, 3, 4, 1", "Why not?")


@dataclass
class Stream(threading.Thread):
    """One streamed answer, read in a thread of its own."""

    client: httpx.Client
    model: str
    index: int
    draft_length: int | None
    token_ids: list[int] = field(default_factory=list)
    # When tokens came, in time.monotonic seconds.
    times: list[float] = field(default_factory=list)
    last_event: str = ""

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        body = {
            "model": self.model, "prompt": PROMPTS[self.index], "max_tokens": MAX_TOKENS,
            "temperature": 0.8 * (self.index % 2), "seed": self.index, "ignore_eos": True,
            "stream": True, "return_token_ids": True,
        }  # fmt: skip
        if self.draft_length is not None:
            body["speculation"] = {"draft_length": self.draft_length}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == httpx.codes.OK
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                self.last_event = line.removeprefix("data:").strip()
                if self.last_event == "[DONE]":
                    continue
                event = json.loads(self.last_event)
                assert "error" not in event, event
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        self.token_ids += choice["token_ids"]
                        self.times.append(time.monotonic())

    def longest_gap(self) -> float:
        return max(b - a for a, b in zip(self.times, self.times[1:], strict=False))


@dataclass
class Services:
    """The three, as a client sees them, and what lies between them."""

    client: httpx.Client
    model: str
    link: TcpProxy  # target to draft service
    decode: TcpProxy  # gateway to target
    undisturbed: list[list[int]] = field(default_factory=list)

    def start_streams(self, draft_length: int | None = None) -> list[Stream]:
        streams = [
            Stream(self.client, self.model, index, draft_length) for index in range(len(PROMPTS))
        ]
        for stream in streams:
            stream.start()
        return streams

    def wait_for(self, streams: list[Stream], num_tokens: int) -> None:
        """Until each has so many tokens."""
        self.until(lambda: min(len(stream.token_ids) for stream in streams) >= num_tokens)

    def finish(self, streams: list[Stream]) -> None:
        """Reads them to their end: nothing is lost, twice there or another token."""
        for stream in streams:
            stream.join(60)
            assert not stream.is_alive()
            assert stream.last_event == "[DONE]", stream.last_event
        assert [stream.token_ids for stream in streams] == self.undisturbed

    def metric(self, name: str) -> float:
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(name + " "):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def until(self, is_so, seconds: float = 20.0) -> None:  # type: ignore[no-untyped-def]
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, self.client.get("/status").text
            time.sleep(0.02)

    def is_ready(self) -> bool:
        return self.client.get("/readyz").status_code == 200


@contextmanager
def partitioned_services(model: Path) -> Iterator[Services]:
    """Ready, and their answers without drafts and failures known."""
    target, draft, gateway, rest = free_ports(4)
    environment = {"OUTRIDER_DRAIN_TIMEOUT": "2", "OUTRIDER_MODEL": str(model)}
    with tcp_proxies() as proxy_to:
        link, decode = proxy_to(draft), proxy_to(target)
        commands = [
            ["target_service", "--port", str(target), "--draft-address", link.address],
            ["draft_service", "--port", str(draft), "--draft", "ngram"],
            ["gateway", "--port", str(gateway), "--rest-port", str(rest),
             "--target-address", decode.address, "--draft-address", f"127.0.0.1:{draft}",
             "--speculation", "fixed", "--peer-timeout", str(PEER_TIMEOUT_SECONDS)],
        ]  # fmt: skip
        with (
            services(commands, environment),
            httpx.Client(
                base_url=f"http://127.0.0.1:{rest}", timeout=60, trust_env=False
            ) as client,
        ):
            wait_ready(client)
            name = client.get("/v1/models").json()["data"][0]["id"]
            running = Services(client=client, model=name, link=link, decode=decode)
            streams = running.start_streams(draft_length=0)
            for stream in streams:
                stream.join(60)
            running.undisturbed = [stream.token_ids for stream in streams]
            assert all(len(token_ids) == MAX_TOKENS for token_ids in running.undisturbed)
            yield running
