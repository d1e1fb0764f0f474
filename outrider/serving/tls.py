"""TLS from files: what a service shows to its callers, whom it lets in, and whom it trusts itself.

Files are read once, at start-up. Knows nothing of what is said over the connections.
"""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from outrider.serving.errors import ConfigurationError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of PEM files; empty = not given. `client_ca` makes TLS mutual: callers without a
    certificate of these authorities are refused.
    """

    certificate: str = ""
    key: str = ""
    client_ca: str = ""
    # Authorities of the services that this one calls; given = these connections use TLS.
    peer_ca: str = ""


NO_TLS = TlsFiles()


def check_tls(files: TlsFiles) -> None:
    """Raises ConfigurationError for files that are missing, do not belong together or are no
    longer valid.
    """
    _check_pair(files.certificate, files.key)
    if files.client_ca and not files.certificate:
        raise ConfigurationError("tls-client-ca needs tls-certificate and tls-key")
    for flag, path in (("tls-client-ca", files.client_ca), ("tls-peer-ca", files.peer_ca)):
        if path:
            _load_authorities(flag, path)
    if files.certificate:
        certificate_names(files)


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials | None:
    """For a gRPC port; None = plain text."""
    if not files.certificate:
        return None
    return grpc.ssl_server_credentials(
        [(_read(files.key), _read(files.certificate))],
        root_certificates=_read(files.client_ca) if files.client_ca else None,
        require_client_auth=bool(files.client_ca),
    )


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials | None:
    """For calls to other services, with the own certificate as identity; None = plain text."""
    if not files.peer_ca:
        return None
    return grpc.ssl_channel_credentials(
        root_certificates=_read(files.peer_ca),
        private_key=_read(files.key) if files.key else None,
        certificate_chain=_read(files.certificate) if files.certificate else None,
    )


def own_channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials | None:
    """For calls to a service of this very certificate, whatever address it is reached at: use
    with `certificate_names`. None = plain text.
    """
    if not files.certificate:
        return None
    chain = _read(files.certificate)
    return grpc.ssl_channel_credentials(
        root_certificates=chain, private_key=_read(files.key), certificate_chain=chain
    )


def own_client_context(files: TlsFiles) -> ssl.SSLContext | bool:
    """As `verify` of an HTTP client that asks a server of this very certificate."""
    if not files.certificate:
        return True
    context = _context_that_trusts(files.certificate)
    context.load_cert_chain(files.certificate, files.key)
    return context


def client_context(*, ca: str, certificate: str, key: str) -> ssl.SSLContext | bool:
    """As `verify` of an HTTP client: trusts these authorities, the system's where none are given,
    and shows a certificate where one is given. Raises ConfigurationError.
    """
    _check_pair(certificate, key)
    try:
        context = ssl.create_default_context(cafile=ca or None)
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        raise ConfigurationError(f"TLS files: {_words(error)}") from error
    return context


def certificate_names(files: TlsFiles) -> list[str]:
    """The DNS names and addresses that the certificate is for; at least one.

    Raises ConfigurationError if it has none, is not valid now, or the key is another's.
    """
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        server.load_cert_chain(files.certificate, files.key)
        client = _context_that_trusts(files.certificate)
        # A handshake with itself is the library's own way to read and check a certificate.
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        ours = client.wrap_bio(to_client, to_server)
        theirs = server.wrap_bio(to_server, to_client, server_side=True)
        for side in (ours, theirs, ours):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    except OSError as error:
        raise ConfigurationError(
            f"tls-certificate {files.certificate}, tls-key {files.key}: {_words(error)}"
        ) from error
    shown = ours.getpeercert() or {}
    alternatives = shown.get("subjectAltName", ())
    names = [str(entry[1]) for entry in alternatives if entry[0] in ("DNS", "IP Address")]
    if not names:
        raise ConfigurationError(
            f"tls-certificate {files.certificate} has no subject alternative name, must have at "
            "least one DNS name or address"
        )
    return names


def _check_pair(certificate: str, key: str) -> None:
    if bool(certificate) != bool(key):
        raise ConfigurationError("tls-certificate and tls-key: one is given without the other")


def _context_that_trusts(certificate: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    # The certificate itself is what is trusted, not only who signed it.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.load_verify_locations(certificate)
    return context


def _load_authorities(flag: str, path: str) -> None:
    try:
        ssl.create_default_context(cafile=path)
    except OSError as error:
        raise ConfigurationError(f"{flag} {path}: {_words(error)}") from error


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: {_words(error)}") from error


def _words(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    return error.strerror or str(error)
