"""How a server treats its callers."""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bitnet_inference.errors import InvalidParams
from bitnet_inference.server.keys import Key

_ORIGIN = r"\*|null|[a-z][a-z0-9+.-]*://[^/\sA-Z]+"


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Raises InvalidParams for what is impossible.

    `keys`: who may use it; none: everybody. `requests_per_minute` and `max_running` are of each key (of each address
    where there are none); None is no limit. `cors_origins`: web pages from elsewhere that may use it, "*" for all.
    `max_body_bytes`: larger requests are refused. `max_connections`: more are closed at once. `header_timeout_s`,
    `body_timeout_s`: so long a client may take to send its headers, and each part of its body; ten times as long for
    all of the body. `reader_timeout_s`: who takes nothing of its answer for so long is dropped. `request_timeout_s`: an
    answer that takes longer ends as "length". `max_priority`: the highest that requests may ask for.
    `shutdown_delay_s`: after SIGTERM, so long new requests are still served while /ready says no; then requests under
    way have `drain_timeout_s` until they are cancelled.
    """

    keys: Sequence[Key] = ()
    requests_per_minute: int | None = None
    max_running: int | None = None
    cors_origins: Sequence[str] = ()
    max_body_bytes: int = 4 << 20
    max_connections: int = 20_000
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    reader_timeout_s: float = 300.0
    request_timeout_s: float | None = None
    max_priority: int = 0
    shutdown_delay_s: float = 0.0
    drain_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        for name in ("requests_per_minute", "max_running", "max_body_bytes", "max_connections"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidParams(f"{name} is {value}: give a whole number of at least 1")
        if self.max_priority < 0:
            raise InvalidParams(f"max_priority is {self.max_priority}: give 0, which requests have, or more")
        for name in ("header_timeout_s", "body_timeout_s", "reader_timeout_s", "request_timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InvalidParams(f"{name} is {value}: give seconds, more than 0")
        for name in ("shutdown_delay_s", "drain_timeout_s"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InvalidParams(f"{name} is {getattr(self, name)}: give seconds, 0 or more")
        for origin in self.cors_origins:
            if not re.fullmatch(_ORIGIN, origin):
                cure = 'give scheme://host or scheme://host:port, in small letters, or "*"'
                raise InvalidParams(
                    f"cors_origins: {origin!r:.80} is nothing that a browser sends as its Origin: {cure}"
                )


@dataclass(frozen=True, kw_only=True)
class Listening:
    """Where a server listens. Raises InvalidParams for what is impossible.

    `certificate` and `private_key` are PEM files, both or none. `trusted_proxies`: addresses, networks, or "*", whose
    X-Forwarded-For and X-Forwarded-Proto are believed.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    certificate: Path | None = None
    private_key: Path | None = None
    trusted_proxies: Sequence[str] = ("127.0.0.1",)

    def __post_init__(self) -> None:
        if not self.host:  # which the system takes for all networks
            raise InvalidParams("host is empty: give an address or a name, as 127.0.0.1")
        if not 0 <= self.port < 1 << 16:
            raise InvalidParams(f"port is {self.port}: give 1 to 65535, or 0 for any that is free")
        if (self.certificate is None) != (self.private_key is None):
            raise InvalidParams("TLS takes a certificate and a private key: give both files, or none")
        for file in (self.certificate, self.private_key):
            if file is not None and not file.is_file():
                raise InvalidParams(f"{file}: there is no such file: give the path of a PEM file")
        if self.certificate is not None and self.private_key is not None:
            _check_pair(self.certificate, self.private_key)
        for each in self.trusted_proxies:
            if each != "*" and not _is_network(each):
                raise InvalidParams(f'trusted_proxies: {each!r:.80} is no address: give one, a network, or "*"')

    @property
    def url(self) -> str:
        """Where clients find it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'http' if self.certificate is None else 'https'}://{host}:{self.port}"

    @property
    def is_private(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host in ("127.0.0.1", "localhost", "::1")


def _check_pair(certificate: Path, private_key: Path) -> None:
    try:  # an empty password: else the terminal is asked for that of an encrypted key
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, private_key, password="")
    except OSError as error:
        why = (error.reason or "no PEM") if isinstance(error, ssl.SSLError) else error.strerror
        cure = "give a certificate in PEM and its own private key, without a password"
        raise InvalidParams(f"{certificate} and {private_key} are no pair for TLS ({why}): {cure}") from None


def _is_network(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
