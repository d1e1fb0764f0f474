"""Certificates for tests: an authority, whom it signed, and others that must be refused."""

import datetime
from dataclasses import dataclass
from pathlib import Path

import trustme

from outrider.serving.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """PEM files of a certificate and its key."""

    certificate: str
    key: str


class Authority:
    """Signs for 127.0.0.1; files are written into a folder."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._ca = trustme.CA()
        self.ca = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)

    def sign(self, name: str, *, expired: bool = False) -> Pair:
        not_after = None
        if expired:
            not_after = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=1)
        issued = self._ca.issue_cert("127.0.0.1", common_name=name, not_after=not_after)
        pair = Pair(
            certificate=str(self._folder / f"{name}.pem"),
            key=str(self._folder / f"{name}.key"),
        )
        for index, blob in enumerate(issued.cert_chain_pems):
            blob.write_to_path(pair.certificate, append=index > 0)
        issued.private_key_pem.write_to_path(pair.key)
        return pair

    def files(self, name: str, **options: bool) -> TlsFiles:
        """Of a member of a cluster in which everybody shows a certificate."""
        pair = self.sign(name, **options)
        return TlsFiles(
            certificate=pair.certificate, key=pair.key, client_ca=self.ca, peer_ca=self.ca
        )
