"""Who we are, read from our token."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from polyrl_operator.leader import service_account

CLAIMS = {"kubernetes.io": {"serviceaccount": {"name": "polyrl-operator", "uid": "u-1"}}}


def token(claims: object) -> str:
    return f"head.{base64.urlsafe_b64encode(json.dumps(claims).encode()).decode().rstrip('=')}.signature"


def test_a_pods_token_names_its_service_account(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token(CLAIMS))
    reference = service_account(tmp_path / "token")
    assert reference == {"apiVersion": "v1", "kind": "ServiceAccount", "name": "polyrl-operator", "uid": "u-1"}


@pytest.mark.parametrize("text", ["", "opaque", "a.b.c", token({}), token([]), token({"kubernetes.io": None}), "é.ü.ß"])
def test_anything_else_names_nobody(text: str, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(text)
    assert service_account(tmp_path / "token") is None
    assert service_account(tmp_path / "absent") is None
