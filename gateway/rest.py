"""The REST side: OpenAI's endpoints, and those for operators."""

import time
from collections.abc import Sequence

from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response

from gateway.authentication import RestAuthentication
from gateway.cluster import Cluster
from gateway.completions import Completions
from gateway.config import GatewayConfig
from gateway.generator import Gateway, Generator
from gateway.metrics import Snapshot, ask_statistics
from gateway.rest_errors import error_response, json_response
from gateway.stats import Statistics
from gateway.status_page import readiness, status_page
from gateway.tokenization import Tokenization
from outrider import __version__
from outrider.serving.api_keys import ApiKeys
from outrider.serving.errors import ServiceError
from outrider.serving.lifecycle import Lifecycle


class Operations:
    """/livez, /readyz, /health, /status, /metrics and the list of models."""

    def __init__(
        self,
        *,
        config: GatewayConfig,
        lifecycle: Lifecycle[Gateway],
        cluster: Cluster,
        statistics: Statistics,
        generator: Generator,
    ) -> None:
        self._config = config
        self._lifecycle = lifecycle
        self._cluster = cluster
        self._statistics = statistics
        self._generator = generator
        self._started_at = int(time.time())

    async def livez(self, request: Request) -> Response:
        """The event loop runs."""
        return json_response({"live": True})

    async def readyz(self, request: Request) -> Response:
        """200 only while requests are taken; the body says why or why not."""
        page = readiness(self._cluster)
        if page["ready"]:
            return json_response(page)
        return json_response(page, 503, {"retry-after": "1"})

    async def status(self, request: Request) -> Response:
        """Everything that is known, in every state."""
        return json_response(status_page(self._cluster, self._lifecycle))

    async def metrics(self, request: Request) -> Response:
        """Prometheus' text format."""
        target = await ask_statistics(self._config.target_address, self._cluster.credentials)
        registry = CollectorRegistry()
        registry.register(Snapshot(cluster=self._cluster, own=self._statistics, target=target))
        return Response(generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        try:
            body = {"object": "list", "data": [self._model_object()]}
        except ServiceError as error:
            return error_response(error)
        return json_response(body)

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{id}."""
        name = request.path_params["name"]
        try:
            body = self._model_object()
        except ServiceError as error:
            return error_response(error)
        if name != body["id"]:
            return _http_error(404, f"model is {name!r}, must be {body['id']!r}", "model_not_found")
        return json_response(body)

    def _model_object(self) -> dict[str, object]:
        model = self._generator.model()
        return {
            "id": model.name,
            "object": "model",
            "created": self._started_at,
            "owned_by": "outrider",
            "max_model_len": model.max_sequence_length,
        }


def rest_app(
    operations: Operations,
    completions: Completions,
    tokenization: Tokenization,
    *,
    cors_origins: Sequence[str],
    api_keys: ApiKeys,
) -> FastAPI:
    """The application; pages of the origins (`*`: of all) may call it from a browser."""
    # The pages for /docs would load scripts from elsewhere.
    app = FastAPI(title="Outrider", version=__version__, docs_url=None, redoc_url=None)
    for path, endpoint, method in (
        ("/livez", operations.livez, "GET"),
        ("/readyz", operations.readyz, "GET"),
        ("/health", operations.readyz, "GET"),
        ("/status", operations.status, "GET"),
        ("/metrics", operations.metrics, "GET"),
        ("/v1/models", operations.models, "GET"),
        ("/v1/models/{name:path}", operations.model, "GET"),
        ("/v1/chat/completions", completions.chat, "POST"),
        ("/v1/completions", completions.text, "POST"),
        ("/tokenize", tokenization.tokenize, "POST"),
        ("/detokenize", tokenization.detokenize, "POST"),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    app.add_exception_handler(HTTPException, _no_such_route)
    if api_keys.are_required:
        app.add_middleware(RestAuthentication, api_keys=api_keys)
    # Around the other one: a browser's preflight has no key, and refusals must reach the page.
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
        )
    return app


async def _no_such_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    words = f"{request.method} {request.url.path}: {error.detail}"
    return _http_error(error.status_code, words, None, dict(error.headers or {}))


def _http_error(
    status: int, message: str, code: str | None, headers: dict[str, str] | None = None
) -> Response:
    body = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return json_response({"error": body}, status, headers)
