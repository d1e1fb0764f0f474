"""Asks a service's health and exits with 0 only if it is SERVING: `python -m
outrider.serving.probe HOST:PORT`.

The container health check of the target and draft services; the gateway's is its /readyz, asked
with `python -m outrider.serving.probe http://HOST:PORT/readyz`.
"""

import sys

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.serving.channel import open_blocking_channel

TIMEOUT_SECONDS = 2.0


def probe_grpc(address: str) -> str:
    """The health status of a gRPC service, or why there is none, in a word or two."""
    with open_blocking_channel(address) as channel:
        try:
            response = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS
            )
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))


def probe_http(url: str) -> str:
    """SERVING if the URL answers 200, else what it answered."""
    try:
        response = httpx.get(url, timeout=TIMEOUT_SECONDS, trust_env=False)
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
    answer = probe_http(place) if place.startswith("http") else probe_grpc(place)
    print(f"{place}: {answer}")
    return 0 if answer == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
