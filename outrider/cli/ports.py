"""Ports for services that talk to each other on this machine."""

import random
import socket

from outrider.serving.errors import ConfigurationError

# Below what kernels hand out for outgoing connections: while a service restarts, a connection must
# not be given its port, least of all the one that tries to reach it.
LOWEST_PORT, HIGHEST_PORT = 20000, 32000
TRIES = 200


def free_port(host: str, taken: set[int]) -> int:
    """A port of `host` that nothing listens on, not in `taken`. Raises ConfigurationError."""
    for _ in range(TRIES):
        port = random.randint(LOWEST_PORT, HIGHEST_PORT)
        if port not in taken and _refusal(host, port) is None:
            return port
    raise ConfigurationError(
        f"no free port found on {host} in {TRIES} tries between {LOWEST_PORT} and {HIGHEST_PORT}"
    )


def require_free(flag: str, host: str, port: int) -> None:
    """Raises ConfigurationError, naming the flag, if the port cannot be listened on."""
    refusal = _refusal(host, port)
    if refusal is not None:
        raise ConfigurationError(f"{flag} {port}: cannot listen on {host}:{port}: {refusal}")


def _refusal(host: str, port: int) -> str | None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind((host, port))
            # Two sockets may be bound to one port, but only one of them listens.
            candidate.listen(1)
        except OSError as error:
            return error.strerror or str(error)
    return None
