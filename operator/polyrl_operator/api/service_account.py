"""Who the operator is in its pod: its ServiceAccount, as its own token names it. The Lease belongs to it, and so goes
when the release goes, whose objects the operator may by then no longer touch.

Refuses to verify the token, which is for the API server to do. Read next: `leader`.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Final

from polyrl.cluster.actions import Object

TOKEN: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")


def own_reference(token: Path = TOKEN) -> Object | None:
    """An owner reference to our ServiceAccount; None outside a pod, and for a token of another kind."""
    try:
        payload = token.read_text(encoding="ascii").split(".")[1]
        claims = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
        account = claims["kubernetes.io"]["serviceaccount"]
        return {"apiVersion": "v1", "kind": "ServiceAccount", "name": account["name"], "uid": account["uid"]}
    except (OSError, ValueError, LookupError, TypeError):
        return None
