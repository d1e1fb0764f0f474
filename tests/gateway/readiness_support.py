"""What the tests of readiness share: statuses, words, and a client in mid-stream."""

import threading

from outrider.v1 import status_pb2

CHAT = {
    "model": "smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 12,
}
REFUSED = status_pb2.LINK_STATE_REFUSED
OPEN = status_pb2.LINK_STATE_OPEN_CIRCUIT
CLOSED = status_pb2.LINK_STATE_CLOSED_CIRCUIT


def loading(stage: str):
    def change(message: status_pb2.ServiceStatus) -> None:
        message.state = status_pb2.SERVICE_STATE_LOADING
        message.stages.add(name=stage, state=status_pb2.STAGE_STATE_RUNNING, detail="shard 3 of 9")

    return change


def serving(message: status_pb2.ServiceStatus) -> None:
    message.state = status_pb2.SERVICE_STATE_SERVING
    del message.stages[:]


def failed_words(cluster) -> str:
    cluster.until(lambda: cluster.service_line("gateway")["state"] == "FAILED")
    line = cluster.service_line("gateway")
    return f"{line['stage']}: {line['reason']}"


def restart(cluster, peer) -> None:
    """The peer's process is killed and another one starts at the same address."""
    cluster.call(peer.stop())
    cluster.do(peer.new_process)
    cluster.call(peer.start())


class Reader(threading.Thread):
    """A client in the middle of a long stream."""

    def __init__(self, cluster) -> None:
        super().__init__(daemon=True)
        self.cluster = cluster
        self.events: list[str] = []
        self.start()
        cluster.until(lambda: len(self.events) > 2)

    def run(self) -> None:
        body = {**CHAT, "max_tokens": 450, "stream": True, "speculation": {"draft_length": 0}}
        with self.cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))
