"""TLS and mutual TLS of the gateway, to its clients and to its peers."""

import ssl

import grpc
import httpx
import pytest
from cluster_under_test import running_cluster
from readiness_support import CHAT

from outrider.serving.access import OwnAccess, http_access
from outrider.serving.channel import open_blocking_channel
from outrider.serving.tls import TlsFiles, channel_credentials, server_credentials
from outrider.v1 import generation_pb2, generation_pb2_grpc
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("strangers"))


@pytest.fixture(scope="module")
def mutual(loop, authority):
    """Everybody shows a certificate: the gateway's clients, the gateway, and its peers."""
    files = authority.files("gateway")
    with running_cluster(loop) as cluster:
        for peer in (cluster.target, cluster.draft):
            cluster.call(peer.stop())
            peer.credentials = server_credentials(authority.files("peer"))
            cluster.call(peer.start())
        cluster.start_gateway(
            tls_certificate=files.certificate, tls_key=files.key,
            tls_client_ca=files.client_ca, tls_peer_ca=files.peer_ca,
        )  # fmt: skip
        cluster.wait_ready()
        yield cluster


def generate(cluster, files: TlsFiles) -> int:
    address = f"127.0.0.1:{cluster.grpc_port}"
    with open_blocking_channel(address, channel_credentials(files)) as channel:
        request = generation_pb2.GenerateRequest(prompt="Hi", max_tokens=3)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return sum(1 for _ in stub.Generate(request, timeout=5))


def chat(cluster, **options: str) -> int:
    access = http_access(**options)
    with httpx.Client(base_url=cluster.url, verify=access.verify, trust_env=False) as client:
        return client.post("/v1/chat/completions", json=CHAT).status_code


def test_a_client_with_a_certificate_of_the_authority_is_let_in(mutual, authority):
    files = authority.files("client")
    assert generate(mutual, files)
    status = chat(mutual, ca=authority.ca, certificate=files.certificate, key=files.key)
    assert status == 200
    assert mutual.client.get("/metrics").text.count("outrider_emitted_tokens_total")


@pytest.mark.parametrize("who", ["nobody", "expired", "stranger"])
def test_without_a_certificate_or_with_one_that_is_expired_or_a_strangers_nobody_is_let_in(
    mutual, authority, strangers, who
):
    shown = {}
    if who != "nobody":
        signer = strangers if who == "stranger" else authority
        pair = signer.sign(who, expired=who == "expired")
        shown = {"certificate": pair.certificate, "key": pair.key}
    with pytest.raises((httpx.ConnectError, httpx.ReadError, httpx.RemoteProtocolError)):
        chat(mutual, ca=authority.ca, **shown)
    with pytest.raises(grpc.RpcError) as caught:
        generate(mutual, TlsFiles(peer_ca=authority.ca, **shown))
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_plain_text_and_a_client_that_does_not_trust_the_authority_get_nowhere(mutual, strangers):
    with pytest.raises(httpx.HTTPError):
        httpx.get(mutual.url.replace("https", "http") + "/livez", trust_env=False)
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        chat(mutual, ca=strangers.ca)
    with pytest.raises(grpc.RpcError):
        generate(mutual, strangers.files("client"))
    with pytest.raises(grpc.RpcError):
        generate(mutual, TlsFiles())


def test_old_protocol_versions_are_refused(mutual, authority):
    files = authority.files("client")
    context = ssl.create_default_context(cafile=authority.ca)
    context.load_cert_chain(files.certificate, files.key)
    with pytest.warns(DeprecationWarning):
        context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{mutual.url}/livez", verify=context, trust_env=False)


def test_a_gateway_does_not_talk_to_a_peer_that_it_cannot_trust(cluster, authority, strangers):
    cluster.call(cluster.target.stop())
    cluster.target.credentials = server_credentials(strangers.files("peer"))
    cluster.call(cluster.target.start())
    cluster.start_gateway(tls_peer_ca=authority.ca)
    cluster.until(lambda: "CERTIFICATE_VERIFY_FAILED" in cluster.service_line("target")["reason"])
    assert cluster.service_line("target")["state"] == "UNREACHABLE"
    # One that speaks plain text is not trusted either.
    assert cluster.service_line("draft")["state"] == "UNREACHABLE"
    assert cluster.readyz()[0] == 503 and cluster.model.admitted == []


def test_tls_alone_asks_clients_for_no_certificate(cluster, authority):
    pair = authority.sign("server")
    cluster.start_gateway(tls_certificate=pair.certificate, tls_key=pair.key)
    cluster.wait_ready()
    assert chat(cluster, ca=authority.ca) == 200
    assert generate(cluster, TlsFiles(peer_ca=authority.ca))
    own = OwnAccess(tls=TlsFiles(certificate=pair.certificate, key=pair.key))
    assert own.scheme == "https"
