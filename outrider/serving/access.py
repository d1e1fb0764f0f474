"""How a client is let in: the key that it shows, whom it trusts, and the certificate it has."""

import ssl
from dataclasses import dataclass, field

import grpc

from outrider.serving.channel import open_channel
from outrider.serving.tls import (
    NO_TLS,
    TlsFiles,
    certificate_names,
    client_context,
    own_channel_credentials,
    own_client_context,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAccess:
    """Of a client of the REST API, as httpx takes them."""

    headers: dict[str, str] = field(default_factory=dict)
    verify: ssl.SSLContext | bool = True


OPEN_ACCESS = HttpAccess()


def http_access(
    *, api_key: str = "", ca: str = "", certificate: str = "", key: str = ""
) -> HttpAccess:
    """From a key and PEM files; empty = not given. Raises ConfigurationError."""
    # Made only where it is asked for: loading the system's authorities takes a moment.
    needs_context = bool(ca or certificate or key)
    return HttpAccess(
        headers=bearer(api_key),
        verify=client_context(ca=ca, certificate=certificate, key=key) if needs_context else True,
    )


def bearer(api_key: str) -> dict[str, str]:
    """The header that shows a key; none without one."""
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAccess:
    """To a service that was started from the same files: it is trusted by its very certificate,
    whatever address it is reached at.
    """

    api_key: str = ""
    tls: TlsFiles = NO_TLS

    @property
    def scheme(self) -> str:
        """Of its REST API's URL."""
        return "https" if self.tls.certificate else "http"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Of every RPC."""
        return tuple(bearer(self.api_key).items())

    def http(self) -> HttpAccess:
        """To its REST API."""
        return HttpAccess(headers=bearer(self.api_key), verify=own_client_context(self.tls))

    def open_channel(self, address: str) -> grpc.aio.Channel:
        """To its gRPC port."""
        if not self.tls.certificate:
            return open_channel(address)
        return open_channel(
            address,
            own_channel_credentials(self.tls),
            server_name=certificate_names(self.tls)[0],
        )


UNGUARDED = OwnAccess()
