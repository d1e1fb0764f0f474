"""TLS files at start-up: what is wrong with them is said by name, before a port is opened."""

import pytest

from outrider.serving.config import parse_config
from outrider.serving.errors import ConfigurationError
from outrider.serving.network import is_loopback, tls_exposure
from outrider.serving.tls import TlsFiles, certificate_names, check_tls
from target_service.config import TargetConfig
from tests.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


def test_right_files_pass_and_name_whom_they_are_for(authority):
    files = authority.files("right")
    check_tls(files)
    assert certificate_names(files) == ["127.0.0.1"]
    check_tls(TlsFiles())


def refusal(files: TlsFiles) -> str:
    with pytest.raises(ConfigurationError) as caught:
        check_tls(files)
    return str(caught.value)


def test_wrong_files_are_refused_by_name(authority, tmp_path):
    right, other = authority.sign("one"), authority.sign("two")
    expired = authority.sign("old", expired=True)
    junk = tmp_path / "junk.pem"
    junk.write_text("no certificate")
    assert "without the other" in refusal(TlsFiles(certificate=right.certificate))
    assert "without the other" in refusal(TlsFiles(key=right.key))
    assert "tls-client-ca needs" in refusal(TlsFiles(client_ca=authority.ca))
    assert "expired" in refusal(TlsFiles(certificate=expired.certificate, key=expired.key))
    assert other.key in refusal(TlsFiles(certificate=right.certificate, key=other.key))
    assert "tls-peer-ca /nowhere: No such file" in refusal(TlsFiles(peer_ca="/nowhere"))
    assert f"tls-peer-ca {junk}" in refusal(TlsFiles(peer_ca=str(junk)))
    assert str(junk) in refusal(TlsFiles(certificate=str(junk), key=right.key))


def test_a_service_does_not_start_with_them():
    with pytest.raises(ConfigurationError, match="tls-peer-ca /nowhere"):
        parse_config(TargetConfig, "target", ["--tls-peer-ca", "/nowhere"], {})


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.7", False), ("a.example", False), ("", False),
    ],
)  # fmt: skip
def test_who_can_reach_an_address(host, expected):
    assert is_loopback(host) is expected


def test_what_a_port_asks_is_said_in_words():
    assert tls_exposure(TlsFiles()) == "WITHOUT TLS"
    assert "without asking" in tls_exposure(TlsFiles(certificate="c", key="k"))
    assert "mutual" in tls_exposure(TlsFiles(certificate="c", key="k", client_ca="a"))
