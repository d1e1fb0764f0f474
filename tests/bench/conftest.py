"""A server whose streamed answers a test lays down, one behind the other's time."""

import asyncio
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse


class StreamServer:
    """Answers chats with the pieces and pauses of `pieces`; keeps what it was asked."""

    def __init__(self) -> None:
        self.pieces: list[dict[str, Any]] = []
        self.pause_seconds = 0.0
        self.status = 200
        self.metrics: list[str] = []
        self.asked: list[dict[str, Any]] = []
        self.headers: list[str | None] = []
        self.running = self.most_running = 0
        app = FastAPI()
        app.post("/v1/chat/completions")(self._chat)
        app.post("/v1/completions")(self._chat)
        app.get("/v1/models")(self._models)
        app.get("/metrics")(self._metrics)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error")
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    async def _models(self) -> Any:
        return {"data": [{"id": "a-model"}]}

    async def _metrics(self) -> Any:
        # The last one stays.
        text = self.metrics.pop(0) if len(self.metrics) > 1 else "".join(self.metrics)
        return PlainTextResponse(text, status_code=200 if text else 404)

    async def _chat(self, request: Request) -> Any:
        self.asked.append({"path": request.url.path, **await request.json()})
        self.headers.append(request.headers.get("authorization"))
        if self.status != 200:
            return JSONResponse({"error": {"message": "too much"}}, status_code=self.status)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> Any:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for piece in self.pieces:
                await asyncio.sleep(self.pause_seconds)
                yield f"data: {json.dumps(piece)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.running -= 1

    @property
    def url(self) -> str:
        port = self._server.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"

    def start(self) -> None:
        self._thread.start()
        while not self._server.started:
            threading.Event().wait(0.01)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def server() -> Iterator[StreamServer]:
    server = StreamServer()
    server.start()
    yield server
    server.stop()
