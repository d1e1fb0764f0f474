"""Who can reach an address, and what an operator should know about it."""

import ipaddress

from outrider.serving.tls import TlsFiles


def is_loopback(host: str) -> bool:
    """Only processes of this machine reach it."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        # A name: it is the resolver's to say, and that can change.
        return False


def tls_exposure(files: TlsFiles) -> str:
    """What a port with these files asks of its callers, in words."""
    if not files.certificate:
        return "WITHOUT TLS"
    if not files.client_ca:
        return "over TLS, without asking for the caller's certificate"
    return "over mutual TLS"
