"""Which keys are known, and whether a caller has shown one of them.

Only digests are kept. A key is compared with every digest, in constant time, so that how long a
refusal takes tells nothing.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outrider.serving.errors import ConfigurationError, Unauthenticated

# Shorter ones can be guessed.
MIN_KEY_LENGTH = 16
_LINE = re.compile(r"(?P<name>[\w.@-]{1,64})\s+sha256:(?P<digest>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """The digests of the keys that are known; without any, everybody is let in."""

    digests: tuple[bytes, ...]

    @property
    def are_required(self) -> bool:
        """Callers need one."""
        return bool(self.digests)

    def check(self, authorization: str | bytes | None) -> None:
        """Raises Unauthenticated unless the header's value is `Bearer` and a key that is known."""
        if not self.are_required:
            return
        if authorization is None:
            raise Unauthenticated("no API key: send it in the header Authorization: Bearer KEY")
        if isinstance(authorization, str):
            authorization = authorization.encode("utf-8", "surrogateescape")
        scheme, _, key = authorization.partition(b" ")
        shown = hashlib.sha256(key.strip()).digest()
        is_known = False
        for digest in self.digests:
            is_known |= hmac.compare_digest(shown, digest)
        if not is_known or scheme.lower() != b"bearer":
            raise Unauthenticated("the API key is not known")


def load_api_keys(keys: str, path: str) -> ApiKeys:
    """From keys in clear, separated by commas, and a file of digests. Raises ConfigurationError,
    which never shows a key.
    """
    digests = [_digest(key.strip()) for key in keys.split(",") if key.strip()]
    if keys and not digests:
        raise ConfigurationError("api-keys holds no key")
    if path:
        digests.extend(_read(path))
    return ApiKeys(digests=tuple(digests))


def new_key() -> str:
    """A key that nobody guesses."""
    return f"sk-{secrets.token_urlsafe(32)}"


def line_of(name: str, key: str) -> str:
    """The line of a key in the file of digests."""
    line = f"{name} sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    if not _LINE.fullmatch(line):
        raise ConfigurationError(f"name is {name!r}, must be letters, digits, '.', '@', '_' or '-'")
    return line


def _digest(key: str) -> bytes:
    if len(key) < MIN_KEY_LENGTH:
        raise ConfigurationError(
            f"api-keys holds a key of {len(key)} characters, must be at least {MIN_KEY_LENGTH}"
        )
    return hashlib.sha256(key.encode()).digest()


def _read(path: str) -> Iterable[bytes]:
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"api-key-file {path}: {error}") from error
    digests = []
    for number, line in enumerate(lines, start=1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None:
            raise ConfigurationError(
                f"api-key-file {path}, line {number}: must be NAME sha256:HEX "
                "(`outrider api-key NAME` makes one)"
            )
        digests.append(bytes.fromhex(match["digest"]))
    if not digests:
        # Otherwise an emptied file would let everybody in.
        raise ConfigurationError(f"api-key-file {path} holds no key")
    return digests
