"""A gateway's REST API with answers that a test lays down."""

import http.server
import json
import threading
from collections.abc import Mapping
from typing import Any


class RestServer:
    """Answers each path with (status, body); bodies of requests are kept."""

    def __init__(self, answers: Mapping[str, tuple[int, str]]) -> None:
        self.requests: list[dict[str, Any]] = []
        self._answers = answers
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "RestServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _handler(self) -> type[http.server.BaseHTTPRequestHandler]:
        answers, requests = self._answers, self.requests

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer()

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                requests.append(json.loads(self.rfile.read(length)))
                self._answer()

            def _answer(self) -> None:
                status, body = answers[self.path]
                data = body.encode()
                self.send_response(status)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler


def server_sent_events(*events: dict[str, Any]) -> str:
    """A stream as the gateway sends it."""
    lines = [*(json.dumps(event) for event in events), "[DONE]"]
    return "".join(f"data: {line}\n\n" for line in lines)
