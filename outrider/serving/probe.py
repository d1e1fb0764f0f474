"""Asks a service's health and exits with 0 only if it is SERVING: `python -m
outrider.serving.probe HOST:PORT`.

The container health check of the target and draft services; the gateway's is its /readyz, asked
with `python -m outrider.serving.probe http://HOST:PORT/readyz`. A service with TLS is trusted by
the certificate in the variables OUTRIDER_TLS_CERTIFICATE and OUTRIDER_TLS_KEY, which is shown to it
as well.
"""

import os
import sys

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.serving.channel import open_blocking_channel
from outrider.serving.errors import ConfigurationError
from outrider.serving.tls import (
    NO_TLS,
    TlsFiles,
    certificate_names,
    own_channel_credentials,
    own_client_context,
)

TIMEOUT_SECONDS = 2.0


def probe_grpc(address: str, tls: TlsFiles = NO_TLS) -> str:
    """The health status of a gRPC service, or why there is none, in a word or two."""
    credentials = own_channel_credentials(tls)
    server_name = certificate_names(tls)[0] if credentials else ""
    with open_blocking_channel(address, credentials, server_name=server_name) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def probe_http(url: str, tls: TlsFiles) -> str:
    """SERVING if the URL answers 200, else what it answered."""
    try:
        response = httpx.get(
            url, timeout=TIMEOUT_SECONDS, trust_env=False, verify=own_client_context(tls)
        )
    except httpx.HTTPError as error:
        return f"{type(error).__name__}: {error}"
    if response.status_code == 200:
        return "SERVING"
    return f"{response.status_code}: {response.text}"


def main() -> int:
    if len(sys.argv) != 2:
        print("usage: python -m outrider.serving.probe HOST:PORT | URL", file=sys.stderr)
        return 2
    place = sys.argv[1]
    # The service's own variables: the probe runs where the service does.
    tls = TlsFiles(
        certificate=os.environ.get("OUTRIDER_TLS_CERTIFICATE", ""),
        key=os.environ.get("OUTRIDER_TLS_KEY", ""),
    )
    probe = probe_http if place.startswith("http") else probe_grpc
    try:
        answer = probe(place, tls)
    except ConfigurationError as error:
        answer = str(error)
    print(f"{place}: {answer}")
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
