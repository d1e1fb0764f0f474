"""API keys over REST and gRPC: who is let in, what stays open, and what a refusal says."""

import hashlib
import json

import grpc
import pytest
from cluster_under_test import running_cluster
from hypothesis import given
from hypothesis import strategies as st
from readiness_support import CHAT

from outrider.serving.api_keys import ApiKeys, line_of, load_api_keys, new_key
from outrider.serving.errors import ConfigurationError, Unauthenticated
from outrider.v1 import generation_pb2, generation_pb2_grpc

CLEAR = "clear-key-0123456789"
FILED = "sk-of-the-file-abcdef"


@pytest.fixture(scope="module")
def guarded(loop, tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text(f"# clients\n\n{line_of('alice', FILED)}\n")
    with running_cluster(loop) as cluster:
        cluster.start_gateway(
            api_keys=f"{CLEAR}, another-key-0123456", api_key_file=str(path),
            cors_origins="https://a.example",
        )  # fmt: skip
        cluster.wait_ready()
        yield cluster


def generate(cluster, *metadata: tuple[str, str]) -> int:
    with grpc.insecure_channel(
        f"127.0.0.1:{cluster.grpc_port}", options=[("grpc.enable_http_proxy", 0)]
    ) as channel:
        request = generation_pb2.GenerateRequest(prompt="Hi", max_tokens=3)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        return sum(1 for _ in stub.Generate(request, metadata=metadata, timeout=10))


@pytest.mark.parametrize("key", [CLEAR, FILED, "another-key-0123456"])
def test_every_key_that_is_known_is_let_in(guarded, key):
    headers = {"authorization": f"Bearer {key}"}
    assert guarded.client.post("/v1/chat/completions", json=CHAT, headers=headers).is_success
    for path in ("/v1/models", "/status", "/metrics"):
        assert guarded.client.get(path, headers=headers).status_code == 200
    assert generate(guarded, ("authorization", f"Bearer {key}"))


REFUSED = [
    "",
    "Bearer",
    "Bearer wrong-key-0123456789",
    f"Basic {CLEAR}",
    f"Bearer {CLEAR} ,",
    f"Bearer {CLEAR.upper()}",
    CLEAR,
    # The digest is no key.
    f"Bearer {hashlib.sha256(FILED.encode()).hexdigest()}",
]


@pytest.mark.parametrize("authorization", [None, *REFUSED])
def test_without_a_key_or_with_a_wrong_one_everything_but_readiness_is_refused(
    guarded, authorization
):
    headers = {} if authorization is None else {"authorization": authorization}
    admitted = len(guarded.model.admitted)
    for method, path in (
        ("POST", "/v1/chat/completions"), ("POST", "/v1/completions"), ("POST", "/tokenize"),
        ("POST", "/detokenize"), ("GET", "/v1/models"), ("GET", "/status"), ("GET", "/metrics"),
        ("GET", "/openapi.json"), ("GET", "/not-there"), ("POST", "/livez/"),
    ):  # fmt: skip
        response = guarded.client.request(method, path, headers=headers, content=b"not read")
        assert response.status_code == 401, path
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert CLEAR not in response.text
    for path in ("/livez", "/readyz", "/health"):
        assert guarded.client.get(path, headers=headers).status_code == 200
    with pytest.raises(grpc.RpcError) as caught:
        generate(guarded, *(headers.items()))
    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert len(guarded.model.admitted) == admitted


def test_two_keys_in_one_request_are_none(guarded):
    both = [("authorization", f"Bearer {CLEAR}"), ("authorization", f"Bearer {FILED}")]
    assert guarded.client.get("/v1/models", headers=both).status_code == 401
    with pytest.raises(grpc.RpcError):
        generate(guarded, *both)


def test_a_browser_can_ask_beforehand_and_reads_why_it_was_refused(guarded):
    origin = {"origin": "https://a.example"}
    asked = {**origin, "access-control-request-method": "POST",
             "access-control-request-headers": "authorization"}  # fmt: skip
    assert guarded.client.options("/v1/chat/completions", headers=asked).status_code == 200
    refused = guarded.client.post("/v1/chat/completions", json=CHAT, headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"


def test_no_key_is_shown_in_the_status(guarded):
    headers = {"authorization": f"Bearer {CLEAR}"}
    text = guarded.client.get("/status", headers=headers).text
    assert CLEAR not in text and "another-key" not in text
    shown = json.loads(text)["details"]["gateway"]["configuration"]["api-keys"]
    assert set(shown) == {"*"}


@pytest.mark.parametrize(
    ("keys", "lines", "words"),
    [
        ("short", None, "a key of 5 characters, must be at least 16"),
        (" , ", None, "holds no key"),
        ("", "", "holds no key"),
        ("", "alice " + CLEAR, "line 1: must be NAME sha256:HEX"),
        ("", "# ok\nalice sha256:12", "line 2"),
    ],
)
def test_what_is_no_key_is_refused_at_start_up_and_not_shown(tmp_path, keys, lines, words):
    path = ""
    if lines is not None:
        path = str(tmp_path / "keys")
        (tmp_path / "keys").write_text(lines)
    with pytest.raises(ConfigurationError, match=words) as caught:
        load_api_keys(keys, path)
    assert CLEAR not in str(caught.value)


def test_a_file_that_is_not_there_is_refused():
    with pytest.raises(ConfigurationError, match="api-key-file /nowhere"):
        load_api_keys("", "/nowhere")


@given(st.binary(max_size=80))
def test_no_bytes_are_let_in_by_chance_and_none_break_the_check(authorization):
    keys = load_api_keys(CLEAR, "")
    if authorization.strip().lower() != f"bearer {CLEAR}".encode():
        with pytest.raises(Unauthenticated):
            keys.check(authorization)


def test_new_keys_differ_and_are_long_enough():
    one, other = new_key(), new_key()
    assert one != other and len(one) > 40
    assert load_api_keys(one, "").are_required
    assert not ApiKeys(digests=()).are_required


def test_every_digest_is_compared_whichever_matches(monkeypatch):
    compared = []

    def compare(first: bytes, second: bytes) -> bool:
        compared.append(second)
        return first == second

    monkeypatch.setattr("outrider.serving.api_keys.hmac.compare_digest", compare)
    keys = load_api_keys(f"{CLEAR},{FILED},third-key-0123456789", "")
    keys.check(f"Bearer {CLEAR}")
    with pytest.raises(Unauthenticated):
        keys.check("Bearer nothing-of-the-kind")
    assert compared == [*keys.digests, *keys.digests]
