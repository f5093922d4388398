"""HTTPS for the manager's API: certificate and key from files, plain HTTP on the loopback only.

Clients pin the run's own authority, so the certificate needs no name that the world knows.
Refuses to hold: the making of certificates (the operator's). Read next: `http_api`.
"""

from __future__ import annotations

import ipaddress
import ssl
from pathlib import Path

from polyrl.errors import InvalidData
from polyrl.worker import EVERYWHERE


def https_of(bind: str, certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """How the API on address `bind` is encrypted; None: not at all. Raises InvalidData naming what is missing."""
    if (certificate is None) != (key is None):
        raise InvalidData("--tls-cert and --tls-key: give both or neither")
    if certificate is None or key is None:
        if not _is_loopback(bind):
            raise InvalidData(f"--bind {bind}: needs --tls-cert and --tls-key; plain HTTP is for the loopback only")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidData(f"{certificate}, {key}: not a certificate and its key: {error.strerror or error}") from None
    return context


def _is_loopback(bind: str) -> bool:
    if bind == EVERYWHERE:
        return False
    try:
        return ipaddress.ip_address(bind).is_loopback
    except ValueError:
        raise InvalidData(f"--bind {bind}: is not an IP address, nor {EVERYWHERE} for all of them") from None
