"""A job's Secret: the key file of every role, and the manager's certificate. Drawn once; what pods mount is by item.

Refuses to hold: secrets after the request that stores them. Read next: `certificate`, `polyrl.keys`.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Final

from polyrl.cluster.actions import MakeKeys, Object
from polyrl.cluster.resources.owner import Owner
from polyrl.keys import FILE_NAMES, OperatorKeys, format_keys, parse_keys
from polyrl_operator.certificate import make_certificate
from polyrl_operator.keygen import make_run_keys

AUTHORITY: Final = "ca.crt"
CERTIFICATE: Final = "tls.crt"
PRIVATE_KEY: Final = "tls.key"


@dataclass(frozen=True)
class ManagerCredentials:
    """What the operator needs to speak with a manager."""

    token: str = field(repr=False)
    authority: str
    """PEM of the certificate authority that signed the manager's certificate."""


def keys_secret(owner: Owner, action: MakeKeys) -> Object:
    """The Secret with fresh keys."""
    files = {FILE_NAMES[type(keys)]: format_keys(keys).encode() for keys in make_run_keys()}
    made = make_certificate(action.hosts)
    files |= {AUTHORITY: made.authority, CERTIFICATE: made.certificate, PRIVATE_KEY: made.key}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": owner.metadata(action.name),
        "type": "Opaque",
        "immutable": True,
        "data": {name: base64.b64encode(content).decode() for name, content in files.items()},
    }


def access(secret: Object) -> ManagerCredentials:
    """The operator's part of a Secret as stored. Raises InvalidData or KeyError when it is not one of ours."""
    data = {name: base64.b64decode(text) for name, text in (secret.get("data") or {}).items()}
    source = f"Secret {secret['metadata']['name']}"
    keys = parse_keys(OperatorKeys, data[FILE_NAMES[OperatorKeys]], source)
    return ManagerCredentials(keys.http_token, data[AUTHORITY].decode())
