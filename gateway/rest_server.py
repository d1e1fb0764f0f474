"""uvicorn in an event loop that belongs to somebody else."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from fastapi import FastAPI

from gateway.head_timeout import HeadTimeoutProtocol
from outrider.serving.errors import ConfigurationError
from outrider.serving.tls import TlsFiles

BACKLOG = 2048


class RestServer(uvicorn.Server):
    """Leaves the process's signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def rest_server(app: FastAPI, *, tls: TlsFiles, shutdown_seconds: int) -> RestServer:
    """A server for one application; `serve(sockets=[...])` runs it until `should_exit`."""
    return RestServer(
        uvicorn.Config(
            app,
            http=HeadTimeoutProtocol,
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_graceful_shutdown=shutdown_seconds,
            ssl_certfile=tls.certificate or None,
            ssl_keyfile=tls.key or None,
            ssl_ca_certs=tls.client_ca or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls.client_ca else ssl.CERT_NONE,
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """An open port. Raises ConfigurationError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {host}:{port}: {error}") from error
